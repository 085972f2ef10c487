"""Statistics of attention from its whole matrix: the oracle of the fast versions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ag.kernels.softmax import PLAIN, Softmax, weigh

Kind = Literal["sum", "max", "squares"]
KINDS: tuple[Kind, ...] = ("sum", "max", "squares")


def reference_attention_stats(
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
    """Compute :func:`ag.kernels.attention_stats.attention_stats` with n^2 memory."""
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    heads = q.shape[1]
    distance = query_ranks[:, None, :, None] - key_ranks[:, :, None]
    visible = (distance >= 0) & (key_ranks >= 0)[:, :, None]
    if window is not None:
        visible &= distance < window
    counted = visible & (distance >= skip)
    visible, counted = (x.repeat_interleave(heads // x.shape[1], 1) for x in (visible, counted))
    there = (key_ranks >= 0).expand(-1, k.shape[1], -1)
    k = k.masked_fill(~there[..., None], 0.0).repeat_interleave(heads // k.shape[1], 1)
    s = softmax.capped((q @ k.mT) * scaling).masked_fill(~visible, float("-inf"))
    weights = weigh(s, softmax.by_head(4)).masked_fill(~counted, 0.0)
    if factors is not None:
        weights = weights * factors[:, None, :, None].to(weights.dtype)
    if kind == "max":
        return weights.amax(2)
    return (weights if kind == "sum" else weights**2).sum(2)
