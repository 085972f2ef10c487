"""Column maxima in Triton: the kernels of column sums, which keep the largest weight in registers instead of a sum."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.column_sums.triton import columns


@torch.compiler.disable
def triton_column_max(
    q: Tensor,
    k: Tensor,
    scaling: float,
    queries: Tensor,
    key_valid: Tensor | None = None,
    window: int | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """Compute :func:`ag.kernels.column_max.column_max` with ``O(B H T)`` memory."""
    return columns(q, k, scaling, queries, key_valid, window, largest=True, factors=factors)
