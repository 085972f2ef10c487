"""The numerical tests on other processors: other instruction sets and numbers of threads, in any order.

PyTorch sums in another order on each, and so finds bounds that only held by chance.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
NUMERICAL = [
    *(f"kernels/test_{name}.py" for name in ("row_statistics", "hard_inputs", "column_sums", "gated_attention")),
    *(f"kernels/test_{name}.py" for name in ("gated_prefill", "ragged_decode")),
    *(f"engine/test_{name}.py" for name in ("precision", "wrappers", "scorers", "observe", "allocators")),
    "integration/test_golden.py",
]
HIGHEST = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}.get(torch.backends.cpu.get_cpu_capability(), 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # beside other work
@pytest.mark.parametrize(
    ("capability", "threads", "order"),
    [("default", 2, 1), ("default", 1, 2), ("avx2", 1, 1), ("avx2", 2, 2), ("avx512", 2, 1), ("avx512", 1, 2)],
)
def test_numbers_do_not_depend_on_the_machine(capability, threads, order, tmp_path):
    if {"default": 0, "avx2": 1, "avx512": 2}[capability] > HIGHEST:
        pytest.skip(f"this processor has no {capability}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment |= {"ATEN_CPU_CAPABILITY": capability, "AG_TEST_THREADS": str(threads)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
    files = [str(HERE / file) for file in NUMERICAL]
    done = subprocess.run(
        [*command, f"--shuffle={order}", *files], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
