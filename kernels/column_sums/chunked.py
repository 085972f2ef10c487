"""Column sums in blocks of queries: memory linear in T."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.columns import blocks
from ag.kernels.softmax import PLAIN, Softmax


def chunked_column_sums(
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
    """Compute :func:`ag.kernels.column_sums.column_sums` with memory linear in T."""
    shape, acc = (*k.shape[:2], q.shape[1] // k.shape[1], k.shape[2]), torch.promote_types(q.dtype, torch.float32)
    sums = torch.zeros(shape, dtype=acc, device=q.device)
    counts = torch.zeros(len(q), 1, k.shape[2], dtype=acc, device=q.device)
    for rows, weights, visible, near in blocks(q, k, scaling, queries, key_valid, window, skip, softmax):
        counted = visible & ~near & queries[:, None, rows, None]
        seen = weights.shape[-1]
        sums[..., :seen] += (weights**power).masked_fill_(~counted[:, :, None], 0.0).sum(3)
        counts[..., :seen] += counted.sum(2)
    if mean:
        sums /= counts.clamp_min(1)[:, :, None]
    return sums.flatten(1, 2)
