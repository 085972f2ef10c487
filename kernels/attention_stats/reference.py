"""Statistics of attention from its matrix, in blocks of queries, on any device."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ag.kernels.softmax import PLAIN, Softmax, weigh

Kind = Literal["sum", "max", "squares"]
STATISTICS: tuple[Kind, ...] = ("sum", "max", "squares")
BLOCK = 128  # queries of a block


def attention_stats(
    kind: Kind,
    q: Tensor,
    k: Tensor,
    query_indices: Tensor,
    key_indices: Tensor,
    scaling: float,
    window: int | None = None,
    skip: int = 0,
    factors: Tensor | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Compute :func:`ag.kernels.attention_stats.attention_stats` with ``O(B H BLOCK N)`` memory."""
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    heads, valid = q.shape[1], key_indices >= 0
    k = k.masked_fill(~valid[..., None], 0.0).repeat_interleave(heads // k.shape[1], 1)
    total = k.new_zeros(*k.shape[:3])
    for start in range(0, q.shape[2], BLOCK):
        block = slice(start, start + BLOCK)
        if not bool((query_indices[:, block] >= 0).any()):
            continue
        distance = query_indices[:, None, block, None] - key_indices[:, :, None]
        visible = (distance >= 0) & valid[:, :, None]
        if window is not None:
            visible &= distance < window
        counted = visible & (distance >= skip)
        visible, counted = (x.repeat_interleave(heads // x.shape[1], 1) for x in (visible, counted))
        with torch.autocast(q.device.type, enabled=False):
            products = q[:, :, block] @ k.mT
        s = softmax.capped(products * scaling).masked_fill(~visible, float("-inf"))
        weights = weigh(s, softmax.by_head(4)).masked_fill(~counted, 0.0)
        if factors is not None:
            weights = weights * factors[:, None, block, None].to(weights.dtype)
        if kind == "max":
            total = total.maximum(weights.amax(2))
        else:
            total = total + (weights if kind == "sum" else weights**2).sum(2)
    return total
