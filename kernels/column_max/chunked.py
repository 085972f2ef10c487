"""Column maxima in blocks of queries: memory linear in T."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.columns import blocks
from ag.kernels.softmax import PLAIN, Softmax


def chunked_column_max(
    q: Tensor,
    k: Tensor,
    scaling: float,
    queries: Tensor,
    key_valid: Tensor | None = None,
    window: int | None = None,
    factors: Tensor | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Compute :func:`ag.kernels.column_max.column_max` with memory linear in T."""
    shape, acc = (*k.shape[:2], q.shape[1] // k.shape[1], k.shape[2]), torch.promote_types(q.dtype, torch.float32)
    largest = torch.zeros(shape, dtype=acc, device=q.device)
    for rows, weights, *_ in blocks(q, k, scaling, queries, key_valid, window, softmax=softmax):
        weights.masked_fill_(~queries[:, None, None, rows, None], 0.0)
        if factors is not None:
            weights *= factors[:, None, None, rows, None].to(acc)
        seen = largest[..., : weights.shape[-1]]
        seen.copy_(torch.maximum(seen, weights.amax(3)))
    return largest.flatten(1, 2)
