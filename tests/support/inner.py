"""Tests in a process of their own, for what must be set before anything is imported."""

import os
import subprocess
import sys
from pathlib import Path


def passed(*words: str | Path, python: str = sys.executable, **environment: str) -> str:
    """Run pytest with these words and variables, expect success, and return what it printed."""
    outer = ("AG_KERNELS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, words)]
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]
    return done.stdout
