"""Prefill under eviction as masking says it, with n^2 memory: the oracle of the other version."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.gated_attention.masks import pair_masks, sink_mask


def reference_gated_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    key_valid: Tensor | None,
    scaling: float,
    recent: int = 1,
    sinks: int = 0,
    window: int | None = None,
) -> Tensor:
    """Compute :func:`ag.kernels.gated_prefill.gated_prefill` with a mask over whole matrices."""
    batch, heads, length, _ = q.shape
    group = heads // k.shape[1]
    index = torch.arange(length, device=q.device)
    sink = sink_mask(key_valid, sinks, batch, length, q.device)
    visible, protected = pair_masks(index, index, key_valid, sink, recent, window, None)
    visible = (visible & (protected | keep[:, :, None, :])).repeat_interleave(group, 1)
    s = (q @ k.repeat_interleave(group, 1).mT) * scaling
    weights = s.masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible, 0.0)
    return weights @ v.repeat_interleave(group, 1)
