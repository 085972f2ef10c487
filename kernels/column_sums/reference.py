"""Column sums from the whole attention matrix: the oracle of the chunked version."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.columns import whole
from ag.kernels.softmax import PLAIN, Softmax


def reference_column_sums(
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
    """Compute :func:`ag.kernels.column_sums.column_sums` with n^2 memory."""
    weights, visible, near = whole(q, k, scaling, key_valid, window, skip, softmax)
    counted = visible & ~near & queries[:, None, :, None]
    sums = (weights**power * counted).sum(2)
    return sums / counted.sum(2).clamp_min(1) if mean else sums
