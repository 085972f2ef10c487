"""Gated attention in tiles: pure PyTorch, memory linear in T, with its own backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ag.kernels.gated_attention.masks import Masks
from ag.kernels.softmax import PLAIN, Softmax

BLOCK = 64  # queries of a tile, unless it becomes too large
TILE = {"cpu": 2**20, "cuda": 2**26}  # pairs of a tile that fits the caches, or that keeps a GPU busy


class _Tile(NamedTuple):
    """Some queries and the keys that they can see, for some of the (sequence, KV head) pairs.

    Every row sees the columns before ``masked_start``, and ``recent`` protects none of these pairs: a key has one
    weight for all rows. From ``masked_start`` on each pair has its own mask.
    """

    part: slice  # of the (sequence, KV head) pairs
    rows: slice
    columns: slice
    masked_start: int  # relative to the columns
    open: bool  # whether the rows ignore the flags


class _Problem:
    """The arguments of one call by (sequence, KV head) pair, P pairs of G query heads, and the steps of both passes.

    Attributes:
        weight: ``[P, T]``, the weight of each key if only sinks are protected. None: all weights are 1.
        free: ``[P, T]`` bool, keys whose flag decides. None: there are no flags.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, masks: Masks, scaling: float, cap: float | None
    ) -> None:
        self.batch, self.kv_heads, self.length, _ = k.shape
        self.group = q.shape[1] // self.kv_heads
        self.pairs = self.batch * self.kv_heads
        self.q, self.k, self.v = self.by_pair(q), k.flatten(0, 1), v.flatten(0, 1)
        self.masks, self.scaling, self.cap = masks, scaling, cap
        self.acc = torch.promote_types(q.dtype, torch.float32)
        self.sink = masks.sink(k)
        self.keep = None if keep is None else keep.to(self.acc).flatten(0, 1)
        self.valid = None if masks.key_valid is None else self._each(masks.key_valid)
        self.weight, self.free = self.keep, None
        if self.keep is not None:
            self.free = ~self._each(self.sink) if self.valid is None else ~self._each(self.sink) & self.valid
            self.weight = torch.where(self._each(self.sink), 1.0, self.keep)
        if self.valid is not None:
            self.weight = self.valid.to(self.acc) if self.weight is None else self.weight * self.valid

    def by_pair(self, x: Tensor) -> Tensor:
        """Reshape ``[B, H, T, ...]`` to ``[P, G, T, ...]``."""
        return x.reshape(self.pairs, self.group, *x.shape[2:])

    def _each(self, x: Tensor) -> Tensor:
        """Repeat a tensor ``[B, ...]`` for the KV heads of each sequence, ``[P, ...]``."""
        return x.repeat_interleave(self.kv_heads, 0)

    def tiles(self) -> Iterator[_Tile]:
        """Yield every tile."""
        size = TILE.get(self.q.device.type, TILE["cuda"]) // max(1, self.group * self.length)
        width = min(max(size, 16), BLOCK if self.q.device.type == "cpu" else 4 * BLOCK)
        pairs, (_, recent, _, window, dense_until, first) = max(1, size // width), self.masks
        dense = (0, 0) if dense_until is None else (int(dense_until.min()), int(dense_until.max()))
        borders = None if first is None else first.tolist()
        for start in range(0, self.length, width):
            stop = min(start + width, self.length)
            oldest = 0 if window is None else max(0, start - window + 1)
            opened = stop <= dense[0]
            uneven = window is not None or (start < dense[1] and not opened)
            for pair in range(0, self.pairs, pairs):
                part = slice(pair, min(pair + pairs, self.pairs))
                begin, by_pair = oldest, uneven
                if borders is not None:
                    documents = borders[part.start // self.kv_heads : (part.stop - 1) // self.kv_heads + 1]
                    # queries of padding may see later columns alone: their tile keeps one column, which is hidden
                    begin = min(max(oldest, min(row[start] for row in documents)), stop - 1)
                    by_pair = uneven or max(row[stop - 1] for row in documents) > begin
                masked_start = 0 if by_pair else max(0, start - recent + 1 - begin)
                yield _Tile(part, slice(start, stop), slice(begin, stop), masked_start, opened)

    def logits(self, tile: _Tile) -> Tensor:
        """Return the logits ``s`` of a tile, ``[p, G * rows, columns]``."""
        q, k = self.rows(self.q, tile), self.k[tile.part, tile.columns]
        if q.dtype in (self.acc, torch.float16):  # products that are not scaled may overflow float16
            s = ((q * self.scaling) @ k.mT).to(self.acc)
        else:
            s = (q @ k.mT).to(self.acc).mul_(self.scaling)
        return s if self.cap is None else s.div_(self.cap).tanh_().mul_(self.cap)

    def rows(self, x: Tensor, tile: _Tile) -> Tensor:
        """Return the rows of a tile of ``[P, G, T, D]``, ``[p, G * rows, D]``."""
        return x[tile.part, :, tile.rows].flatten(1, 2)

    def sinks(self, sinks: Tensor, tile: _Tile) -> Tensor:
        """Return the sink logit of each row of a tile, ``[p, G * rows, 1]``, of sink logits ``[H]``."""
        of_pairs = sinks.to(self.acc).view(self.kv_heads, self.group).repeat(self.batch, 1)[tile.part]
        return of_pairs.repeat_interleave(tile.rows.stop - tile.rows.start, 1)[:, :, None]

    def unfolded(self, x: Tensor) -> Tensor:
        """View ``[p, G * rows, N]`` as ``[p, G, rows, N]``."""
        view: Tensor = x.unflatten(1, (self.group, -1))
        return view

    def column_weight(self, tile: _Tile) -> Tensor | None:
        """Return the weights ``[p, 1, masked_start]`` of the first keys of a tile. None: all weights are 1."""
        weight = self.weight if not tile.open else None if self.valid is None else self.valid.to(self.acc)
        first = tile.columns.start
        return None if weight is None else weight[tile.part, None, first : first + tile.masked_start]

    def pair_masks(self, tile: _Tile) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the invisible pairs, the pairs that a flag decides, and the flags, from column ``masked_start`` on.

        Each is ``[p or 1, 1, rows, columns - masked_start]``; without flags the last two are None.
        """
        columns = slice(tile.columns.start + tile.masked_start, tile.columns.stop)
        visible, protected = self.masks.pairs(tile.rows, columns, self.sink)
        visible, protected = (x[:, 0] if len(x) == 1 else self._each(x[:, 0])[tile.part] for x in (visible, protected))
        if self.keep is None:
            return ~visible[:, None], None, None
        free = (visible & ~protected)[:, None]
        return ~visible[:, None], free, self.keep[tile.part, None, None, columns]


class _ChunkedGatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, sink_logits: Tensor | None, *options: Any
    ) -> Tensor:
        problem = _Problem(q, k, v, keep, *options)
        out = q.new_empty(*problem.q.shape[:3], v.shape[-1])
        lse = torch.empty(problem.q.shape[:3], dtype=problem.acc, device=q.device)
        for tile in problem.tiles():
            s = problem.logits(tile)
            weight = problem.column_weight(tile)
            if weight is not None:
                s[..., : tile.masked_start] += weight.log()
            hidden, free, flags = problem.pair_masks(tile)
            masked_logits = problem.unfolded(s)[..., tile.masked_start :]
            if free is not None and flags is not None:
                masked_logits += torch.where(free, flags, 1.0).log()
            masked_logits.masked_fill_(hidden, float("-inf"))
            top = s.amax(-1, keepdim=True)
            sinks = None if sink_logits is None else problem.sinks(sink_logits, tile)
            if sinks is not None:
                top = torch.maximum(top, sinks)
            top.masked_fill_(top == float("-inf"), 0.0)
            s.sub_(top).exp_()
            total = s.sum(-1, keepdim=True)
            if sinks is not None:
                total += (sinks - top).exp()
            mixed = (s.to(v.dtype) @ problem.v[tile.part, tile.columns]).to(problem.acc)
            out[tile.part, :, tile.rows] = problem.unfolded(mixed / total.masked_fill(total == 0, 1.0)).to(out.dtype)
            # a query that sees nothing gets zeros; its infinite sum makes its gradients 0 in the backward pass
            top += total.log().masked_fill_(total == 0, float("inf"))
            lse[tile.part, :, tile.rows] = problem.unfolded(top)[..., 0]
        out, lse = out.view(*q.shape[:3], -1), lse.view(q.shape[:3])
        ctx.save_for_backward(q, k, v, keep, sink_logits, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keep, sink_logits, out, lse = ctx.saved_tensors
        d_sinks = None
        if sink_logits is not None and ctx.needs_input_grad[4]:
            d_sinks = sink_gradient(sink_logits, lse, out, grads[0])
        problem = _Problem(q, k, v, keep, *ctx.options)
        d_out = problem.by_pair(grads[0])
        delta = (d_out.to(problem.acc) * problem.by_pair(out).to(problem.acc)).sum(-1, keepdim=True)
        total = problem.by_pair(lse)[..., None]
        dq = torch.empty_like(problem.q, memory_format=torch.contiguous_format)
        # transposed: with the keys last, the products over the queries run faster
        dk, dv = (x.new_zeros(len(x), x.shape[2], x.shape[1], dtype=problem.acc) for x in (problem.k, problem.v))
        flagged = keep is not None and ctx.needs_input_grad[3]
        d_keep = torch.zeros_like(problem.keep) if flagged and problem.keep is not None else None
        for tile in problem.tiles():
            q_rows, d_rows = problem.rows(problem.q, tile), problem.rows(d_out, tile)
            slope = (d_rows @ problem.v[tile.part, tile.columns].mT).to(problem.acc)
            slope.sub_(problem.rows(delta, tile))
            ratio = problem.logits(tile)
            bent = None if problem.cap is None else 1 - (ratio / problem.cap).square_()
            ratio.sub_(problem.rows(total, tile))
            weight = problem.column_weight(tile)
            if weight is not None:
                # if m is 0, the factor e^(s - lse) of its gradient is at most 1
                unmasked = ratio[..., : tile.masked_start]
                torch.minimum(unmasked, torch.where(weight == 0, 0.0, float("inf")).to(unmasked.dtype), out=unmasked)
            hidden, free, flags = problem.pair_masks(tile)
            masked_logits = problem.unfolded(ratio)[..., tile.masked_start :]
            if free is not None and flags is not None:
                masked_logits.copy_(torch.where(free & (flags == 0), masked_logits.clamp(max=0.0), masked_logits))
            masked_logits.masked_fill_(hidden, float("-inf"))
            ratio.exp_()
            slope.mul_(ratio)
            if d_keep is not None and free is not None:
                columns = d_keep[tile.part, tile.columns]
                if not tile.open:
                    columns[:, : tile.masked_start] += slope[..., : tile.masked_start].sum(1)
                by_pair = problem.unfolded(slope)[..., tile.masked_start :]
                columns[:, tile.masked_start :] += (by_pair * free).sum((1, 2))
            for x in (slope, ratio):  # from here: the gradient of the logits, and the attention weights
                if weight is not None:
                    x[..., : tile.masked_start] *= weight
                if free is not None and flags is not None:
                    problem.unfolded(x)[..., tile.masked_start :] *= torch.where(free, flags, 1.0)
            ds = (slope if bent is None else slope.mul_(bent)).to(q.dtype)
            dv[tile.part, :, tile.columns] += d_rows.mT @ ratio.to(v.dtype)
            dk[tile.part, :, tile.columns] += q_rows.mT @ ds
            dq[tile.part, :, tile.rows] = problem.unfolded(ds @ problem.k[tile.part, tile.columns])
        d_flags = None
        if d_keep is not None and keep is not None and problem.free is not None:
            d_flags = (d_keep * problem.free).view(keep.shape).to(keep.dtype)
        dq, dk, dv = dq.mul_(problem.scaling).view(q.shape), dk.mul_(problem.scaling).mT, dv.mT
        dk, dv = dk.reshape(k.shape).to(k.dtype), dv.reshape(v.shape).to(v.dtype)
        return dq, dk, dv, d_flags, d_sinks, None, None, None


def sink_gradient(sinks: Tensor, lse: Tensor, out: Tensor, d_out: Tensor) -> Tensor:
    """Return the gradient ``[H]`` of sink logits: minus the sum of ``e^(sink - lse) <dO, o>`` over queries.

    Args:
        sinks: ``[H]``.
        lse: log of each query's sum, ``[B, H, T]``; infinite for a query that sees nothing.
        out: outputs ``[B, H, T, D]``.
        d_out: their gradients.
    """
    delta = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    paid = (sinks.to(lse.dtype)[:, None] - lse).exp() * delta
    return -paid.sum((0, 2)).to(sinks.dtype)


def gated_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, masks: Masks, scaling: float, softmax: Softmax = PLAIN
) -> Tensor:
    """Compute :func:`ag.kernels.gated_attention.gated_attention` with ``O(B H T)`` memory beside its arguments.

    The softmax runs in float32 (float64 for float64 arguments) for any type of q. Only the row sums are saved: the
    backward pass computes each tile again.
    """
    arguments = (q, k, v, keep, softmax.sinks, masks, scaling, softmax.cap)
    out: Tensor = _ChunkedGatedAttention.apply(*arguments)  # type: ignore[no-untyped-call]
    return out
