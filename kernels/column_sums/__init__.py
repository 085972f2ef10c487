"""What each key was paid: sums of attention weights over queries."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.column_sums.chunked import chunked_column_sums
from ag.kernels.column_sums.reference import reference_column_sums
from ag.kernels.dispatch import no_triton, pick
from ag.kernels.softmax import PLAIN, Softmax


def column_sums(
    q: Tensor,
    k: Tensor,
    scaling: float,
    queries: Tensor,
    key_valid: Tensor | None = None,
    window: int | None = None,
    power: int = 1,
    skip: int = 0,
    mean: bool = False,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Sum ``A_jt ** power`` over queries j, where ``A = softmax(scaling * q k^T)`` is causal.

    Args:
        q: queries ``[B, H, M, D]``, those of the last M of T tokens.
        k: keys ``[B, Hkv, T, D]``.
        scaling: factor of the logits.
        queries: ``[B, M]`` bool, the queries that count.
        key_valid: ``[B, T]`` bool, False on padding; None when there is none.
        window: sliding window of the model.
        power: exponent of the weights.
        skip: pairs with ``j - t < skip`` do not count (the weights are normalised over them all the same).
        mean: divide by the number of queries that counted for the key.
        softmax: caps and sink logits of the model, which Triton's version does not know.

    Returns:
        ``[B, H, T]`` float32 (float64 for float64 arguments), 0 for keys that no query counted for.

    Raises:
        UserError: ``AG_KERNELS`` asks for a version that cannot run (see ag.kernels.dispatch).
    """
    version = best_version(q, softmax)
    compute = chunked_column_sums if version == "chunked" else reference_column_sums
    if version == "triton":
        from ag.kernels.column_sums.triton import triton_column_sums

        sums: Tensor = triton_column_sums(q, k, scaling, queries, key_valid, window, power, skip, mean)
        return sums
    return compute(q, k, scaling, queries, key_valid, window, power, skip, mean, softmax)


def best_version(q: Tensor, softmax: Softmax = PLAIN) -> str:
    """Return the version that :func:`column_sums` runs on such queries: ``triton``, ``chunked`` or ``reference``."""
    return pick("column_sums", {"triton": softmax.special or no_triton(q), "chunked": None, "reference": None})
