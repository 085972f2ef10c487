"""Rehearses tests/gpu on a CPU, under Triton's interpreter, so that a card meets tests that work."""

import pytest

from tests.support import TESTS
from tests.support.inner import passed


@pytest.mark.slow
@pytest.mark.timeout(1800)  # beside other work
def test_rehearsal():
    pytest.importorskip("triton", reason="needs Triton")
    passed(TESTS / "gpu", AG_GPU_REHEARSAL="1")
