"""Gated attention by its formula, with n^2 memory: the tests compare the fast versions with it."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.gated_attention.masks import Masks
from ag.kernels.softmax import PLAIN, Softmax


def gated_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, masks: Masks, scaling: float, softmax: Softmax = PLAIN
) -> Tensor:
    """Compute :func:`ag.kernels.gated_attention.gated_attention` by autograd over whole matrices.

    The gradients of q, k and v come from autograd. The gradient of the flags is computed by its formula, because a
    factor is at most 1 for evicted tokens: ``dL/dm_t = sum_j e^{s_jt - lse_j} (dO_j . v_t - dO_j . o_j)`` over the
    pairs that are not protected.
    """
    group, everything = q.shape[1] // k.shape[1], slice(0, q.shape[2])
    visible, protected = masks.pairs(everything, everything, masks.sink(k))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = softmax.capped((q @ k.mT) * scaling)
    m = torch.ones_like(s)
    if keep is not None:
        m = torch.where(protected, m, keep.detach().to(s.dtype).repeat_interleave(group, 1)[:, :, None, :])
    logits = (s + m.log()).masked_fill(~visible, float("-inf"))
    beside = softmax.by_head(4)
    row = logits if beside is None else torch.cat([logits, beside.to(s.dtype).expand(*s.shape[:3], 1)], -1)
    alive = (row > float("-inf")).any(-1, keepdim=True)
    lse = row.masked_fill(~alive, 0.0).logsumexp(-1, keepdim=True)
    out = torch.exp(logits.masked_fill(~alive, float("-inf")) - lse) @ v
    if keep is None or not keep.requires_grad:
        return out
    with torch.no_grad():
        exponent = torch.where(m == 0, (s - lse).clamp(max=0), s - lse)
        ratio = torch.exp(exponent.masked_fill(~visible | protected | ~alive, float("-inf")))
    moving = (keep - keep.detach()).to(s.dtype).repeat_interleave(group, 1)[:, :, None, :] * ratio
    return out + moving @ v.detach() - moving.sum(-1, keepdim=True) * out.detach()
