"""The numerical tests on other processors: other instruction sets and numbers of threads, in any order.

PyTorch sums in another order on each, and so finds bounds that only held by chance.
"""

from pathlib import Path

import pytest
import torch
from inner import passed

HERE = Path(__file__).parent
KERNELS = [
    *(f"kernels/test_{name}.py" for name in ("row_statistics", "hard_inputs", "column_sums", "gated_attention")),
    *(f"kernels/test_{name}.py" for name in ("gated_prefill", "ragged_decode", "paged_decode")),
    *("engine/test_precision.py", "integration/test_golden.py"),
]
ENGINE = [f"engine/test_{name}.py" for name in ("wrappers", "scorers")]  # of short sums
COUNTS = ("memory_is_linear", "work_falls", "random_is_uniform")  # what no processor changes
HIGHEST = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}.get(torch.backends.cpu.get_cpu_capability(), 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # beside other work
@pytest.mark.parametrize(
    ("capability", "threads", "order", "files"),
    # one thread with the highest instruction set is what the tests run with anyway
    [("default", 2, 1, KERNELS + ENGINE), ("avx2", 1, 2, KERNELS)],
    ids=["default", "avx2"],
)
def test_numbers_do_not_depend_on_the_machine(capability, threads, order, files):
    if capability == "avx2" and HIGHEST < 2:
        pytest.skip("this processor has nothing beyond avx2, or not even that")
    options = ("-m", "not slow", "-k", f"not ({' or '.join(COUNTS)})", f"--shuffle={order}")
    # threads that wait for others give the processor to the tests beside them
    given = {"ATEN_CPU_CAPABILITY": capability, "AG_TEST_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    passed(*options, *(HERE / file for file in files), **given)
