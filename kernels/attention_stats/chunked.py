"""Statistics of attention in blocks of queries: memory linear in the number of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.attention_stats.reference import Kind, reference_attention_stats
from ag.kernels.softmax import PLAIN, Softmax

BLOCK = 128  # queries handled at once


def chunked_attention_stats(
    kind: Kind,
    q: Tensor,
    k: Tensor,
    query_ranks: Tensor,
    key_ranks: Tensor,
    scaling: float,
    window: int | None = None,
    skip: int = 0,
    factors: Tensor | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Compute :func:`ag.kernels.attention_stats.attention_stats` block by block."""
    acc = torch.promote_types(q.dtype, torch.float32)
    found = torch.zeros(*q.shape[:2], k.shape[2], dtype=acc, device=q.device)
    k = k.to(acc)
    for start in range(0, q.shape[2], BLOCK):
        block = slice(start, start + BLOCK)
        ranks = query_ranks[:, block]
        if not bool((ranks >= 0).any()):
            continue
        some = None if factors is None else factors[:, block]
        one = reference_attention_stats(
            kind, q[:, :, block].to(acc), k, ranks, key_ranks, scaling, window, skip, some, softmax
        )
        found = found.maximum(one) if kind == "max" else found.add_(one)
    return found
