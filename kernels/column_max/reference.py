"""Column maxima from the whole attention matrix: the oracle of the chunked version."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.columns import whole
from ag.kernels.softmax import PLAIN, Softmax


def reference_column_max(
    q: Tensor,
    k: Tensor,
    scaling: float,
    queries: Tensor,
    key_valid: Tensor | None = None,
    window: int | None = None,
    factors: Tensor | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Compute :func:`ag.kernels.column_max.column_max` with n^2 memory."""
    weights, *_ = whole(q, k, scaling, key_valid, window, softmax=softmax)
    if factors is not None:
        weights = weights * factors[:, None, :, None].to(weights.dtype)
    return weights.masked_fill(~queries[:, None, :, None], 0.0).amax(2)
