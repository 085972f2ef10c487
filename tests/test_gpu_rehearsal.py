"""Rehearses tests/gpu on a CPU, under Triton's interpreter, so that a card meets tests that work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "gpu"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # beside other work
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_rehearsal(file):
    pytest.importorskip("triton", reason="needs Triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / file)]
    environment = {name: value for name, value in os.environ.items() if name != "AG_KERNELS"}
    done = subprocess.run(command, env=environment | {"AG_GPU_REHEARSAL": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]
