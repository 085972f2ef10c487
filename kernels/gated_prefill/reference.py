"""Prefill under eviction as masking says it, with n^2 memory: the oracle of the other version."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.gated_attention.masks import pair_masks, sink_mask
from ag.kernels.softmax import PLAIN, Softmax, weigh


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
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Compute :func:`ag.kernels.gated_prefill.gated_prefill` with a mask over whole matrices."""
    group = q.shape[1] // k.shape[1]
    visible = visible_pairs(keep, key_valid, recent, sinks, window).repeat_interleave(group, 1)
    s = softmax.capped((q @ k.repeat_interleave(group, 1).mT) * scaling)
    weights = weigh(s.masked_fill(~visible, float("-inf")), softmax.by_head(4)).masked_fill(~visible, 0.0)
    return weights @ v.repeat_interleave(group, 1)


def visible_pairs(keep: Tensor, key_valid: Tensor | None, recent: int, sinks: int, window: int | None) -> Tensor:
    """Return which keys each query sees, ``[B, Hkv, T, T]`` bool, of flags ``[B, Hkv, T]`` of what stays."""
    batch, _, length = keep.shape
    index = torch.arange(length, device=keep.device)
    sink = sink_mask(key_valid, sinks, batch, length, keep.device)
    visible, protected = pair_masks(index, index, key_valid, sink, recent, window, None)
    return visible & (protected | keep[:, :, None, :])
