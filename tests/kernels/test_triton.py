"""Runs the tests of the Triton kernels, `test_*_triton.py`, under Triton's interpreter: no GPU is needed.

The variable must be set before Triton is imported, hence a process of its own; in any other they skip.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(1800)  # beside other work
@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("test_*_triton.py")))
def test_under_the_interpreter(file):
    pytest.importorskip("triton", reason="needs Triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / file)]
    environment = {name: value for name, value in os.environ.items() if name != "AG_KERNELS"}
    done = subprocess.run(command, env=environment | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]
