"""Runs the tests of the Triton kernels, `*/test_*_triton.py`, under Triton's interpreter: no GPU is needed.

The variable must be set before Triton is imported, hence a process of its own; in any other they skip.
"""

from pathlib import Path

import pytest

from tests.support.inner import passed
from tests.support.warm import started

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(1800)  # beside other work
@pytest.mark.parametrize("first", [0, 1])  # every other file, for two processors
def test_under_the_interpreter(first):
    pytest.importorskip("triton", reason="needs Triton")
    files = sorted(HERE.parent.glob("*/test_*_triton.py"))
    interpreted = {"TRITON_INTERPRET": "1"}
    assert "skipped" not in passed(*files[first::2], python=started(**interpreted), **interpreted)
