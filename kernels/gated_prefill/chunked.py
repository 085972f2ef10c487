"""Gated prefill in blocks of queries; a block reads the keys that at least one of its queries sees."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.kernels.gated_attention.masks import Masks
from ag.kernels.softmax import PLAIN, Softmax, weigh

SHORT = 256  # up to this length, PyTorch's attention under one mask is faster than blocks
BLOCK = 128  # queries of a block
LONG = 4096  # from this number of kept tokens on, a block has half the queries


def gated_prefill(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, masks: Masks, scaling: float, softmax: Softmax = PLAIN
) -> Tensor:
    """Compute :func:`ag.kernels.gated_prefill.gated_prefill`; only kept pairs and the diagonal are computed.

    The kept keys of a (sequence, KV head) pair are gathered once, in order. The keys up to a query's position are then
    a range; binary search gives its end. The softmax runs in float32 (float64 for float64 arguments). A short
    prompt is one block under a mask.
    """
    batch, heads, length, _ = q.shape
    if length <= SHORT and softmax.plain:
        return _masked(q, k, v, keep, masks, scaling)
    kv_heads, group = k.shape[1], heads // k.shape[1]
    out = torch.zeros_like(q[..., :1].expand(*q.shape[:3], v.shape[-1]), memory_format=torch.contiguous_format)
    kept = keep | masks.sink(k)[:, None]
    evicted = ~kept
    if masks.key_valid is not None:
        kept, evicted = kept & masks.key_valid[:, None], evicted & masks.key_valid[:, None]
    for b in range(batch):
        for h in range(kv_heads):
            part = slice(h * group, (h + 1) * group)
            arguments = q[b, part], k[b, h], v[b, h], kept[b, h], evicted[b, h]
            out[b, part] = _attend_one_head(*arguments, masks.recent, masks.window, scaling, softmax.of_heads(part))
    return out


def _masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, masks: Masks, scaling: float) -> Tensor:
    """Attend with PyTorch's own attention; the query heads of a KV head are the heads of one sequence."""
    batch, heads, length, _ = q.shape
    rows, group = keep.shape[0] * keep.shape[1], heads // k.shape[1]
    visible, protected = masks.pairs(slice(0, length), slice(0, length), masks.sink(keep))
    hidden = ~(visible & (protected | keep[:, :, None, :])).reshape(rows, 1, length, length)
    bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
    q, k, v = (x.reshape(rows, -1, length, x.shape[-1]).expand(-1, group, -1, -1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, bias, scale=scaling)
    if masks.key_valid is not None:  # a padding query may see nothing
        out = out.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return out.reshape(batch, heads, length, -1)


def _attend_one_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor,
    evicted: Tensor,
    recent: int,
    window: int | None,
    scaling: float,
    softmax: Softmax,
) -> Tensor:
    """Attend from the query heads ``[G, T, D]`` of one KV head; ``evicted`` keys are visible only if recent."""
    group, length, dim = q.shape
    acc = torch.promote_types(q.dtype, torch.float32)
    kept_columns, evicted_columns = kept.nonzero().flatten(), evicted.nonzero().flatten()
    kept_k, kept_v = k[kept_columns], v[kept_columns]
    width = BLOCK if len(kept_columns) <= LONG else BLOCK // 2
    starts = torch.arange(0, length, width, device=q.device)
    stops = (starts + width).clamp_max(length)
    oldest = starts * 0 if window is None else (starts - window + 1).clamp_min(0)
    edges = [
        *(torch.searchsorted(kept_columns, x).tolist() for x in (oldest, starts if window is None else oldest, stops)),
        *(torch.searchsorted(evicted_columns, x).tolist() for x in ((starts - recent + 1).maximum(oldest), stops)),
    ]
    out = q.new_empty(group, length, v.shape[-1])
    for start, first, open_until, last, recent_start, recent_end in zip(starts.tolist(), *edges, strict=True):
        stop = min(start + width, length)
        recent_evicted = evicted_columns[recent_start:recent_end]
        keys = torch.cat([kept_k[first:last], k[recent_evicted]])
        values = torch.cat([kept_v[first:last], v[recent_evicted]])
        positions = torch.cat([kept_columns[open_until:last], recent_evicted])
        distance = torch.arange(start, stop, device=q.device)[:, None] - positions
        hidden = distance < 0
        hidden[:, last - open_until :] |= distance[:, last - open_until :] >= recent
        if window is not None:
            hidden |= distance >= window
        rows = q[:, start:stop].reshape(-1, dim)
        if q.dtype in (acc, torch.float16):  # products that are not scaled may overflow float16
            s = ((rows * scaling) @ keys.mT).to(acc)
        else:
            s = (rows @ keys.mT).to(acc).mul_(scaling)
        s = softmax.capped(s)
        by_head = s.view(group, stop - start, -1)
        by_head[..., open_until - first :].masked_fill_(hidden, float("-inf"))
        weights = weigh(by_head, None if softmax.sinks is None else softmax.sinks[:, None, None]).view_as(s)
        if open_until == first:  # a padding query may see nothing
            weights.view_as(by_head).masked_fill_(hidden, 0.0)
        out[:, start:stop] = (weights.to(v.dtype) @ values).view(group, stop - start, -1)
    return out
