"""Runs the tests of the Triton kernels under Triton's interpreter: no GPU is needed.

The variable must be set before Triton is imported, hence another process. There, tests with the parameter ``version``
(tests/support/compiled.py) run the version in Triton; files named ``test_*_triton.py`` are skipped elsewhere.
"""

from pathlib import Path

import pytest

from tests.support.compiled import INTERPRETED
from tests.support.inner import passed

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="elsewhere: this is that process")
@pytest.mark.timeout(1800)  # beside other work
def test_under_the_interpreter(pytestconfig):
    pytest.importorskip("triton", reason="needs Triton")
    given = ["--all"] if pytestconfig.getoption("all") else []
    others = [x for x in TESTS.glob("*/test_*_triton.py") if x.parent.name != "kernels"]
    passed(TESTS / "kernels", *others, "-k", "triton", *given, TRITON_INTERPRET="1")
