"""Prefill under eviction as masking says it, with n^2 memory: the oracle of the other versions."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.gated_attention.masks import Masks
from ag.kernels.softmax import PLAIN, Softmax, weigh


def gated_prefill(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, masks: Masks, scaling: float, softmax: Softmax = PLAIN
) -> Tensor:
    """Compute :func:`ag.kernels.gated_prefill.gated_prefill` with a mask over whole matrices."""
    group = q.shape[1] // k.shape[1]
    visible = visible_pairs(keep, masks).repeat_interleave(group, 1)
    s = softmax.capped((q @ k.repeat_interleave(group, 1).mT) * scaling)
    weights = weigh(s.masked_fill(~visible, float("-inf")), softmax.by_head(4)).masked_fill(~visible, 0.0)
    return weights @ v.repeat_interleave(group, 1)


def visible_pairs(keep: Tensor, masks: Masks) -> Tensor:
    """Return which keys each query sees, ``[B, Hkv, T, T]`` bool, of flags ``[B, Hkv, T]`` of what stays."""
    everything = slice(0, keep.shape[2])
    visible, protected = masks.pairs(everything, everything, masks.sink(keep))
    return visible & (protected | keep[:, :, None, :])
