"""Attention of a response to the kept tokens of a context, with a gradient to the context's flags."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ag.kernels.gated_attention import checked


def replay_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    keep: Tensor | None,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """Attend from the tokens of a response to the kept tokens of its context, and causally to each other.

    The formula and the gradient of the flags are those of :func:`ag.kernels.gated_attention.gated_attention`, for
    queries that come after the tokens with flags: the factor ``e^{s - lse}`` of an evicted token's gradient is held at
    1. Context keys and values get no gradient.

    Args:
        q: queries ``[S, H, R, D]``: the same R tokens under S sets of flags.
        k: keys of the response ``[S, Hkv, R, D]``.
        v: values of the response ``[S, Hkv, R, D]``.
        context_k: keys of the context ``[Hkv, N, D]``.
        context_v: values of the context ``[Hkv, N, D]``.
        keep: flags of the context, each 0 or 1, ``[S, Hkv, N]``; None means that all tokens are kept.
        scaling: factor of the logits.
        window: sliding window of the layer, in tokens; None means that there is none.

    Returns:
        ``[S, H, R, D]``.
    """
    q, k, v = checked("replay_attention", q, k, v, recent=1)
    context_k, context_v = context_k.to(q.dtype), context_v.to(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        out: Tensor = _Replay.apply(  # type: ignore[no-untyped-call]
            q, k, v, context_k, context_v, keep, scaling, window
        )
    return out


def attention_weights(
    q: Tensor, k: Tensor, context_k: Tensor, scaling: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return the weights of the whole context ``[S, Hkv, G R, N]`` and of the response ``[S, Hkv, G R, R]``."""
    far, near = _logits(q.unflatten(1, (k.shape[1], -1)).flatten(2, 3), k, context_k, scaling, window)
    lse = torch.logaddexp(far.logsumexp(-1, keepdim=True), near.logsumexp(-1, keepdim=True))
    return far.sub_(lse).exp_(), near.sub_(lse).exp_()


class _Replay(torch.autograd.Function):
    """The forward and backward passes, which keep no matrix of weights between them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        context_k, context_v, keep, scaling, window = rest
        rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [S, Hkv, G R, D]
        far, near = _logits(rows, k, context_k, scaling, window)
        if keep is not None:
            far.masked_fill_((keep == 0)[:, :, None], float("-inf"))
        top = torch.maximum(far.amax(-1, keepdim=True), near.amax(-1, keepdim=True))
        far.sub_(top).exp_()
        near.sub_(top).exp_()
        total = far.sum(-1, keepdim=True) + near.sum(-1, keepdim=True)
        out = far.div_(total).to(v.dtype) @ context_v + near.div_(total).to(v.dtype) @ v
        ctx.save_for_backward(q, k, v, context_k, context_v, keep, out, top + total.log())
        ctx.options = scaling, window
        whole: Tensor = out.unflatten(2, (-1, q.shape[2])).flatten(1, 2)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context_k, context_v, keep, out, lse = ctx.saved_tensors
        scaling, window = ctx.options
        rows, d_out = (x.unflatten(1, (k.shape[1], -1)).flatten(2, 3) for x in (q, grads[0]))
        delta = (d_out.to(lse.dtype) * out).sum(-1, keepdim=True)
        far, near = (x.sub_(lse) for x in _logits(rows, k, context_k, scaling, window))
        if keep is not None:
            torch.minimum(far, torch.where(keep == 0, 0.0, float("inf"))[:, :, None].to(far), out=far)
        far.exp_()
        near.exp_()
        slope_far = ((d_out @ context_v.mT).to(lse.dtype) - delta) * far
        slope_near = ((d_out @ v.mT).to(lse.dtype) - delta) * near
        d_keep = slope_far.sum(2) if keep is not None and ctx.needs_input_grad[5] else None
        if keep is not None:
            slope_far *= keep[:, :, None]
        slope_far, slope_near = slope_far.to(q.dtype), slope_near.to(q.dtype)
        d_q = (slope_far @ context_k + slope_near @ k) * scaling
        d_k, d_v = slope_near.mT @ rows * scaling, near.to(q.dtype).mT @ d_out
        return d_q.unflatten(2, (-1, q.shape[2])).flatten(1, 2), d_k, d_v, None, None, d_keep, None, None


def _logits(rows: Tensor, k: Tensor, context_k: Tensor, scaling: float, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the logits of ``rows`` ``[S, Hkv, G R, D]`` with the context and with the response, -inf where unseen."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    if rows.dtype == torch.float16:  # products that are not scaled may overflow
        rows, scaling = rows * scaling, 1.0
    far, near = ((rows @ keys.mT).to(wide) * scaling for keys in (context_k, k))
    response, context = k.shape[2], context_k.shape[1]
    later = torch.ones(response, response, dtype=torch.bool, device=k.device).triu(1)
    if window is not None:
        at = torch.arange(context + response, device=k.device)
        gone = at[context:, None] - at >= window
        far.unflatten(2, (-1, response)).masked_fill_(gone[:, :context], float("-inf"))
        later = later | gone[:, context:]
    near.unflatten(2, (-1, response)).masked_fill_(later, float("-inf"))
    return far, near
