"""Attention of a response to the kept tokens of its prompt, with a gradient to the prompt's flags."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ag.kernels.gated_attention import checked


def replay_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prompt_k: Tensor,
    prompt_v: Tensor,
    keep: Tensor | None,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """Attend from the tokens of a response to the kept tokens of its prompt, and causally to the response.

    :func:`ag.kernels.gated_attention.gated_attention` has the formula and the gradient of the flags; here all queries
    come after the tokens with flags. The factor ``e^{s - lse}`` of an evicted token's gradient is at most 1. The
    prompt's keys and values get no gradient.

    Args:
        q: queries ``[S, H, R, D]`` of R tokens under S sets of flags.
        k: keys of the response ``[S, Hkv, R, D]``.
        v: values of the response ``[S, Hkv, R, D]``.
        prompt_k: keys of the prompt ``[Hkv, N, D]``.
        prompt_v: values of the prompt ``[Hkv, N, D]``.
        keep: flags of the prompt, each 0 or 1, ``[S, Hkv, N]``. None: all tokens are kept.
        scaling: factor of the logits.
        window: sliding window of the layer, in tokens. None: no window.

    Returns:
        ``[S, H, R, D]``.
    """
    q, k, v = checked("replay_attention", q, k, v, recent=1)
    prompt_k, prompt_v = prompt_k.to(q.dtype), prompt_v.to(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        out: Tensor = _Replay.apply(  # type: ignore[no-untyped-call]
            q, k, v, prompt_k, prompt_v, keep, scaling, window
        )
    return out


def attention_weights(
    q: Tensor, k: Tensor, prompt_k: Tensor, scaling: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return the weights of the whole prompt ``[S, Hkv, G R, N]`` and of the response ``[S, Hkv, G R, R]``."""
    rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [S, Hkv, G R, D]
    prompt_logits, response_logits = _logits(rows, k, prompt_k, scaling, window)
    lse = torch.logaddexp(prompt_logits.logsumexp(-1, keepdim=True), response_logits.logsumexp(-1, keepdim=True))
    return prompt_logits.sub_(lse).exp_(), response_logits.sub_(lse).exp_()


class _Replay(torch.autograd.Function):
    """The forward and backward passes; no matrix of weights is stored between them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
        prompt_k, prompt_v, keep, scaling, window = arguments
        rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [S, Hkv, G R, D]
        prompt_weights, response_weights = _logits(rows, k, prompt_k, scaling, window)
        if keep is not None:
            prompt_weights.masked_fill_((keep == 0)[:, :, None], float("-inf"))
        largest = torch.maximum(prompt_weights.amax(-1, keepdim=True), response_weights.amax(-1, keepdim=True))
        prompt_weights.sub_(largest).exp_()
        response_weights.sub_(largest).exp_()
        total = prompt_weights.sum(-1, keepdim=True) + response_weights.sum(-1, keepdim=True)
        out = prompt_weights.div_(total).to(v.dtype) @ prompt_v + response_weights.div_(total).to(v.dtype) @ v
        ctx.save_for_backward(q, k, v, prompt_k, prompt_v, keep, out, largest + total.log())
        ctx.options = scaling, window
        output: Tensor = out.unflatten(2, (-1, q.shape[2])).flatten(1, 2)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, prompt_k, prompt_v, keep, out, lse = ctx.saved_tensors
        scaling, window = ctx.options
        rows, d_out = (x.unflatten(1, (k.shape[1], -1)).flatten(2, 3) for x in (q, grads[0]))
        delta = (d_out.to(lse.dtype) * out).sum(-1, keepdim=True)
        prompt_weights, response_weights = (x.sub_(lse) for x in _logits(rows, k, prompt_k, scaling, window))
        if keep is not None:
            max_exponent = torch.where(keep == 0, 0.0, float("inf"))[:, :, None].to(prompt_weights)
            torch.minimum(prompt_weights, max_exponent, out=prompt_weights)
        prompt_weights.exp_()
        response_weights.exp_()
        prompt_slope = (d_out @ prompt_v.mT).to(lse.dtype).sub_(delta).mul_(prompt_weights)
        response_slope = (d_out @ v.mT).to(lse.dtype).sub_(delta).mul_(response_weights)
        d_keep = prompt_slope.sum(2) if keep is not None and ctx.needs_input_grad[5] else None
        if keep is not None:
            prompt_slope *= keep[:, :, None]
        prompt_slope, response_slope = prompt_slope.to(q.dtype), response_slope.to(q.dtype)
        d_q = (prompt_slope @ prompt_k + response_slope @ k) * scaling
        d_k, d_v = response_slope.mT @ rows * scaling, response_weights.to(q.dtype).mT @ d_out
        return d_q.unflatten(2, (-1, q.shape[2])).flatten(1, 2), d_k, d_v, None, None, d_keep, None, None


def _logits(rows: Tensor, k: Tensor, prompt_k: Tensor, scaling: float, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the logits of ``rows`` ``[S, Hkv, G R, D]`` with prompt and response, -inf for tokens they cannot see."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    if rows.dtype == torch.float16:  # products that are not scaled may overflow
        rows, scaling = rows * scaling, 1.0
    prompt_logits, response_logits = ((rows @ keys.mT).to(dtype).mul_(scaling) for keys in (prompt_k, k))
    response_length, prompt_length = k.shape[2], prompt_k.shape[1]
    unseen = torch.ones(response_length, response_length, dtype=torch.bool, device=k.device).triu(1)
    if window is not None:
        token_index = torch.arange(prompt_length + response_length, device=k.device)
        outside_window = token_index[prompt_length:, None] - token_index >= window
        prompt_logits.unflatten(2, (-1, response_length)).masked_fill_(outside_window[:, :prompt_length], float("-inf"))
        unseen = unseen | outside_window[:, prompt_length:]
    response_logits.unflatten(2, (-1, response_length)).masked_fill_(unseen, float("-inf"))
    return prompt_logits, response_logits
