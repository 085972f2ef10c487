"""Rehearses tests/gpu on a CPU, under Triton's interpreter, so that a card meets tests that work."""

from pathlib import Path

import pytest
from inner import passed

FOLDER = Path(__file__).parent / "gpu"
ALL = sorted(path.name for path in FOLDER.glob("test_*.py"))
KERNELS = ["test_column_sums.py", "test_gated_attention.py", "test_gated_prefill.py", "test_ragged_decode.py"]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # beside other work
@pytest.mark.parametrize("files", [KERNELS, [name for name in ALL if name not in KERNELS]], ids=["kernels", "others"])
def test_rehearsal(files):
    pytest.importorskip("triton", reason="needs Triton")
    passed(*(FOLDER / file for file in files), AG_GPU_REHEARSAL="1")
