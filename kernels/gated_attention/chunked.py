"""Gated attention in blocks of queries: pure PyTorch, memory linear in T, with its own backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ag.kernels.gated_attention.masks import pair_masks, sink_mask

BLOCK = 128  # queries handled at once


class _Tiles:
    """The tiles (a block of queries, the keys it can see) of one call and what both passes compute on them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        keep: Tensor | None,
        key_valid: Tensor | None,
        scaling: float,
        recent: int,
        sinks: int,
        window: int | None,
        dense_until: Tensor | None,
    ) -> None:
        self.q, self.k, self.keep, self.key_valid = q, k, keep, key_valid
        self.scaling, self.recent, self.window, self.dense_until = scaling, recent, window, dense_until
        batch, _, self.length, _ = q.shape
        self.group = q.shape[1] // k.shape[1]
        self.sink = sink_mask(key_valid, sinks, batch, self.length, q.device)
        self.acc = torch.promote_types(q.dtype, torch.float32)

    def spans(self) -> list[tuple[slice, slice]]:
        """Return the (rows, columns) of each tile."""
        spans = []
        for start in range(0, self.length, BLOCK):
            stop = min(start + BLOCK, self.length)
            first = 0 if self.window is None else max(0, start - self.window + 1)
            spans.append((slice(start, stop), slice(first, stop)))
        return spans

    def grouped(self, x: Tensor, rows: slice) -> Tensor:
        """Fold the query heads of a KV head into the rows: ``[B, H, T, D] -> [B, Hkv, G * rows, D]``."""
        tile = x[:, :, rows]
        return tile.reshape(x.shape[0], -1, self.group * tile.shape[2], x.shape[-1])

    def logits(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return s, s with the weights and masks in, and the weights; each ``[B, Hkv, G, rows, columns]``.

        The weights are those of the pairs a flag decides, NaN-free, or None when there are no flags.
        """
        batch, kv_heads = self.k.shape[:2]
        index = torch.arange(self.length, device=self.q.device)
        visible, protected = pair_masks(
            index[rows],
            index[columns],
            None if self.key_valid is None else self.key_valid[:, columns],
            self.sink[:, columns],
            self.recent,
            self.window,
            self.dense_until,
        )
        s = (self.grouped(self.q, rows) @ self.k[:, :, columns].mT).to(self.acc) * self.scaling
        s = s.view(batch, kv_heads, self.group, rows.stop - rows.start, columns.stop - columns.start)
        bias = torch.zeros((), dtype=self.acc, device=s.device).masked_fill(~visible, float("-inf"))
        if self.keep is None:
            return s, s + bias[:, :, None], None
        flags = self.keep[:, :, None, columns].to(self.acc)
        free = ~protected & visible
        bias = torch.where(free, flags.log(), bias)
        return s, s + bias[:, :, None], free


class _ChunkedGatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *options: Any) -> Tensor:
        tiles = _Tiles(q, k, keep, *options)
        out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=tiles.acc, device=q.device)
        for rows, columns in tiles.spans():
            _, logits, _ = tiles.logits(rows, columns)
            total = logits.logsumexp(-1, keepdim=True)
            total = total.masked_fill(total == float("-inf"), 0.0)  # a query that sees nothing gets zeros
            weights = torch.exp(logits - total).to(v.dtype).flatten(2, 3)
            tile = weights @ v[:, :, columns]
            out[:, :, rows] = tile.view(q.shape[0], q.shape[1], -1, v.shape[-1])
            lse[:, :, rows] = total.view(q.shape[0], q.shape[1], -1)
        ctx.save_for_backward(q, k, v, keep, out, lse, *(x for x in options if isinstance(x, Tensor)))
        ctx.options = tuple(None if isinstance(x, Tensor) else x for x in options)
        ctx.tensors = tuple(isinstance(x, Tensor) for x in options)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keep, out, lse, *rest = ctx.saved_tensors
        saved = iter(rest)
        options = [next(saved) if tensor else x for tensor, x in zip(ctx.tensors, ctx.options, strict=True)]
        tiles = _Tiles(q, k, keep, *options)
        d_out = grads[0]
        delta = (d_out.to(tiles.acc) * out.to(tiles.acc)).sum(-1, keepdim=True)
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k, dtype=tiles.acc), torch.zeros_like(v, dtype=tiles.acc)
        d_keep = None
        if keep is not None and ctx.needs_input_grad[3]:
            d_keep = torch.zeros_like(keep, dtype=tiles.acc)
        for rows, columns in tiles.spans():
            s, logits, free = tiles.logits(rows, columns)
            shape = s.shape
            total = tiles.grouped(lse[..., None], rows).view(*shape[:4], 1)
            d_tile = tiles.grouped(d_out, rows)
            weights = torch.exp(logits - total)
            dv[:, :, columns] += weights.to(v.dtype).flatten(2, 3).mT @ d_tile
            slope = (d_tile @ v[:, :, columns].mT).to(tiles.acc).view(shape)
            slope -= tiles.grouped(delta, rows).view(*shape[:4], 1)
            if d_keep is not None and free is not None:
                exponent = s - total
                evicted = (keep[:, :, None, None, columns] == 0) & (exponent > 0)
                ratio = torch.exp(exponent.masked_fill(evicted, 0.0).masked_fill(~free[:, :, None], float("-inf")))
                d_keep[:, :, columns] += (ratio * slope).sum((2, 3))
            ds = (weights * slope * tiles.scaling).to(q.dtype).flatten(2, 3)
            dq[:, :, rows] = (ds @ k[:, :, columns]).view(q.shape[0], q.shape[1], -1, q.shape[-1])
            dk[:, :, columns] += ds.mT @ tiles.grouped(q, rows)
        d_flags = None if d_keep is None else d_keep.to(keep.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), d_flags, *(None for _ in options)


def chunked_gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    key_valid: Tensor | None,
    scaling: float,
    recent: int = 1,
    sinks: int = 0,
    window: int | None = None,
    dense_until: Tensor | None = None,
) -> Tensor:
    """Compute :func:`ag.kernels.gated_attention.gated_attention` with ``O(B H T)`` memory beside its arguments.

    The softmax runs in float32 (float64 for float64 arguments) whatever the type of q; only the row sums are saved, so
    that the backward computes each tile again.
    """
    options = (key_valid, scaling, recent, sinks, window, dense_until)
    out: Tensor = _ChunkedGatedAttention.apply(q, k, v, keep, *options)  # type: ignore[no-untyped-call]
    return out
