"""What each key was paid at most: the largest attention weight that a query gives it."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.column_max import cpu
from ag.kernels.column_max.chunked import chunked_column_max
from ag.kernels.column_max.reference import reference_column_max
from ag.kernels.dispatch import no_triton, pick
from ag.kernels.softmax import PLAIN, Softmax


def column_max(
    q: Tensor,
    k: Tensor,
    scaling: float,
    queries: Tensor,
    key_valid: Tensor | None = None,
    window: int | None = None,
    factors: Tensor | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Return the largest ``f_j A_jt`` over queries j, where ``A = softmax(scaling * q k^T)`` is causal.

    The arguments are those of :func:`ag.kernels.column_sums.column_sums`, and ``factors`` ``f``, ``[B, M]``, 0 or more:
    what each query's weights are multiplied by; None: 1. Versions in Triton and C++ know no caps and no sink logits.

    Returns:
        ``[B, H, T]`` float32 (float64 for float64 arguments), 0 for keys that no query counted for.

    Raises:
        UserError: ``AG_KERNELS`` asks for a version that cannot run (see ag.kernels.dispatch).
    """
    versions = {
        "triton": softmax.special or no_triton(q),
        "cpp": softmax.special or cpu.unavailable(q),
        "chunked": None,
        "reference": None,
    }
    version = pick("column_max", versions)
    if version == "triton":
        from ag.kernels.column_max.triton import triton_column_max

        largest: Tensor = triton_column_max(q, k, scaling, queries, key_valid, window, factors)
        return largest
    if version == "cpp":
        return cpu.column_max(q, k, scaling, queries, key_valid, window, factors)
    compute = chunked_column_max if version == "chunked" else reference_column_max
    return compute(q, k, scaling, queries, key_valid, window, factors, softmax)
