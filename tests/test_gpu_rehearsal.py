"""Rehearses tests/gpu on a CPU, under Triton's interpreter, so that a card meets tests that work."""

from pathlib import Path

import pytest
from inner import passed

FOLDER = Path(__file__).parent / "gpu"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # beside other work
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_rehearsal(file):
    pytest.importorskip("triton", reason="needs Triton")
    passed(FOLDER / file, AG_GPU_REHEARSAL="1")
