"""What a layer shows when something has to go: attention rows, logits and outputs, in float32, on demand.

One :class:`Observation` serves all parts of a policy. Nothing here has n^2 memory: all queries are visited in blocks,
and whole rows exist only for a window of the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ag.kernels.row_statistics import Values, best_version, row_statistics
from ag.kernels.row_statistics.reference import Kind, pair_statistics

BLOCK = 64  # queries visited at once
PRECISE = 1024  # keys up to which all queries are multiplied with them in float64, on a CPU
TILE = {"cpu": 2**20, "cuda": 2**27}  # elements of a tile that fits the caches, or that keeps a GPU busy


class AttentionRows:
    """Some queries against held keys: w queries, N keys. Everything is computed when it is asked for.

    Args:
        logits: scaled ``[B, H, w, N]``, ``-inf`` where the query does not see the key.
        values: gives those of the keys, ``[B, Hkv, N, D]`` with H a multiple of Hkv.
        counted: ``[B, w]`` bool, the queries that exist.
        open_until: keys before this one are seen by every query.
        outputs: gives them, less the values' centre, ``[B, H, w, D]`` in the type of the logits, or None.
    """

    def __init__(
        self,
        logits: Tensor,
        values: Callable[[], Values],
        counted: Tensor,
        open_until: int = 0,
        outputs: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        self._make_values, self.counted = values, counted
        self._logits, self._open_until, self._outputs = logits, open_until, outputs
        self._averaged = False  # whether the weights are means, and not those of the logits

    @cached_property
    def values(self) -> Values:
        """Values of the keys, centred."""
        return self._make_values()

    @cached_property
    def a(self) -> Tensor:
        """Weights ``[B, H, w, N]``, a softmax over what the query sees; 0 on the rest."""
        a = self._logits.softmax(-1)
        return a if self._open_until else a.masked_fill(~self.visible, 0.0)  # some row may see nothing

    @cached_property
    def s(self) -> Tensor:
        """Scaled logits ``[B, H, w, N]``; 0 where the query does not see the key."""
        s = self._logits.clone()
        s[..., self._open_until :].masked_fill_(self._hidden, 0.0)
        return s

    @cached_property
    def _hidden(self) -> Tensor:
        """``[B, H, w, N - open_until]`` bool, the pairs that are not visible."""
        return self._logits[..., self._open_until :] == float("-inf")

    @cached_property
    def visible(self) -> Tensor:
        """``[B, H, w, N]`` bool, whether the query sees the key."""
        visible = torch.ones_like(self._logits, dtype=torch.bool)
        visible[..., self._open_until :] = ~self._hidden
        return visible

    @cached_property
    def o(self) -> Tensor:
        """Outputs ``[B, H, w, D]``."""
        v = self.values.v
        batch, heads, rows, keys = self.a.shape
        return (self.a.reshape(batch, v.shape[1], -1, keys) @ v).view(batch, heads, rows, -1)

    def statistic(self, kind: Kind) -> Tensor:
        """Return a statistic of every pair, ``[B, H, w, N]``; see :mod:`ag.kernels.row_statistics`."""
        return pair_statistics(kind, self.a, self.s, self.values)

    def total(self, statistic: Callable[[AttentionRows], Tensor]) -> Tensor:
        """Sum a statistic ``[B, H, w, N]`` over the queries, ``[B, H, N]``; those in ``FUSED`` in one pass."""
        kind = None if self._averaged else FUSED.get(statistic)
        if kind is None or best_version(self._logits) == "reference":
            return self._sum(statistic(self))
        if kind == "attention":
            return row_statistics(kind, self._logits, self.counted)
        return row_statistics(kind, self._logits, self.counted, self.values, self._outputs())

    def _sum(self, values: Tensor) -> Tensor:
        return (self.counted[:, None, None].to(values.dtype) @ values)[:, :, 0]

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the mean and the unbiased variance of the weights over the queries, ``[B, H, N]`` each."""
        return self._moments

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        number = self.counted.sum(1)[:, None, None]
        mean = self._sum(self.a) / number
        squares = self._sum((self.a - mean[:, :, None]).square_())
        return mean, squares / (number - 1).clamp_min(1)

    def mean_heads(self) -> AttentionRows:
        """Return rows whose weights and logits are the means over the query heads of each KV head."""
        group = self._logits.shape[1] // self.values.v.shape[1]
        a, s = (x.unflatten(1, (-1, group)).mean(2) for x in (self.a, self.s))
        rows = AttentionRows(s, self._make_values, self.counted)
        vars(rows).update(a=a, s=s, _averaged=True)  # as if computed
        return rows


Statistic = Callable[[AttentionRows], Tensor]


def attention(rows: AttentionRows) -> Tensor:
    """``A``: what a key is paid."""
    return rows.a


#: Statistics that ag.kernels.row_statistics can sum in one pass, and their names there.
FUSED: dict[Statistic, Kind] = {attention: "attention"}


class Observation:
    """Queries of one layer against the keys it holds.

    Args:
        q: queries ``[B, H, T, D]``, post-RoPE.
        k: held keys ``[B, Hkv, N, D]``, those of the queries' own tokens among them.
        v: held values ``[B, Hkv, N, D]``.
        scaling: factor of the logits.
        query_ranks: ``[B, T]`` long, the place of each query among its sequence's own tokens.
        key_ranks: ``[B, Hkv, N]`` long.
        query_valid: ``[B, T]`` bool, False on padding.
        key_valid: ``[B, Hkv, N]`` bool, False on free slots.
        layer: index of the layer.
        window: sliding window of the model, or None.
        gate: probabilities ``[B, Hkv, N]`` of the layer's gate, or None.
        new: how many of the queries, at the end, were not shown before; None: all.
        memory: what scorers recorded at earlier observations, tensors ``[..., N]`` whose last dimension is that of
            the keys (new tokens have 0); what they record now goes there too.
        prompt_lengths: ``[B]`` long, own tokens of each prompt as far as they are known; None: all tokens seen.
        decoding: whether the prompt is over.
        memo: where measurements are remembered, so that each is made once.
        outputs: attention outputs ``[B, H, new, D]`` of the new queries where they are known, which saves time.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        query_ranks: Tensor,
        key_ranks: Tensor,
        query_valid: Tensor,
        key_valid: Tensor,
        layer: int = 0,
        window: int | None = None,
        gate: Tensor | None = None,
        new: int | None = None,
        memory: dict[str, Tensor] | None = None,
        prompt_lengths: Tensor | None = None,
        decoding: bool = False,
        memo: dict[Hashable, Any] | None = None,
        outputs: Tensor | None = None,
    ) -> None:
        self.layer, self.gate, self.decoding = layer, gate, decoding
        self.new = q.shape[2] if new is None else new
        self.memory = {} if memory is None else memory
        #: Tokens per KV head ``[B]`` that the budget allows, where something may go.
        self.capacity: Tensor | None = None
        #: Sequences ``[B]`` of which something may go now; None: all.
        self.due: Tensor | None = None
        self._memo = {} if memo is None else memo
        self._prompt_lengths = prompt_lengths
        self.q, self.k, self.scaling, self.window = q, k, scaling, window
        self.query_ranks, self.key_ranks = query_ranks, key_ranks
        self.query_valid, self.key_valid = query_valid, key_valid
        self._v = v
        self._outputs = outputs

    @property
    def group(self) -> int:
        """Query heads a KV head, G."""
        return self.q.shape[1] // self.k.shape[1]

    @cached_property
    def values(self) -> Values:
        """Values of the held keys, centred."""
        return Values.of(self._v.float(), self.key_valid)

    @property
    def v(self) -> Tensor:
        """Values ``[B, Hkv, N, D]`` float32, 0 on free slots."""
        return self.values.v

    @cached_property
    def _outputs_serve(self) -> bool:
        """Whether the outputs are known, with rounding errors that are small beside the spread of the values.

        Scores are computed in float32, so that outputs in half precision would not do, nor those of values that are far
        from the origin and close to each other.
        """
        if self._outputs is None or self._outputs.dtype != torch.float32 or self.new != self.q.shape[2]:
            return False
        centre, spread = self.values.centre, self.values.spread
        return bool((centre.square().sum(-1) <= 4 * spread.mean(-1, keepdim=True)).all())

    @cached_property
    def _precise_keys(self) -> Tensor:
        return self.k.double()

    @cached_property
    def _keys(self) -> Tensor:
        return self.k.float()

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens each sequence has seen, ``[B]``: one more than the rank of its newest query."""
        return self.query_ranks.masked_fill(~self.query_valid, -1).amax(1) + 1

    @property
    def prompt_lengths(self) -> Tensor:
        """Own tokens of each prompt, ``[B]``, which shares of a budget refer to."""
        return self.lengths if self._prompt_lengths is None else self._prompt_lengths

    @property
    def evicts(self) -> Tensor:
        """``[B]`` bool, sequences of which something goes: they are due, and their prompt or what is held too long."""
        due = torch.ones_like(self.lengths, dtype=torch.bool) if self.due is None else self.due
        if self.capacity is None:
            return due
        return due & (self.key_valid.sum(-1).amax(1).maximum(self.prompt_lengths) > self.capacity)

    @cached_property
    def age(self) -> Tensor:
        """``[B, Hkv, N]`` long: 0 for the newest token of a sequence, 1 for the one before; any on free slots."""
        return self.lengths[:, None, None] - 1 - self.key_ranks

    def over_layer(self, values: Tensor) -> Tensor:
        """Average ``[B, H, N]`` over all query heads by token, and give it to each KV head, ``[B, Hkv, N]``.

        Heads may hold different tokens; one that no longer holds a token contributes 0 for it.
        """
        kv_heads, tokens = self.k.shape[1], int(self.lengths.max())
        places = self.key_ranks.clamp(0, tokens - 1)
        values = values.unflatten(1, (kv_heads, -1)).sum(2).masked_fill(~self.key_valid, 0.0)
        by_token = values.new_zeros(len(values), tokens)
        by_token.scatter_add_(1, places.flatten(1), values.flatten(1))
        return (by_token[:, None].expand(-1, kv_heads, -1) / self.q.shape[1]).gather(2, places)

    def rows(self, last: int, only_new: bool = False) -> AttentionRows:
        """Return the last ``last`` queries of each sequence, or as many as there are, oldest first.

        Args:
            last: how many.
            only_new: leave out those that were shown before.
        """
        if ("rows", last, only_new) not in self._memo:
            chosen = self.query_valid & (self.query_ranks >= (self.lengths - last)[:, None])
            if only_new:
                chosen[:, : self.q.shape[2] - self.new] = False
            width = min(last, self.new if only_new else self.q.shape[2])
            order = torch.where(chosen, self.query_ranks, -1).argsort(dim=1, stable=True)[:, -width:]
            ranks = self.query_ranks.gather(1, order)
            ((_, open_until, _),) = self._spans(ranks.amin(1, keepdim=True), ranks.amax(1, keepdim=True))
            everything = (0, 0 if self.window is not None else open_until, self.k.shape[2])
            rows = self._rows(order, slice(None), everything, precise=not self.decoding)
            rows.counted = chosen.gather(1, order)
            self._memo["rows", last, only_new] = rows
        found: AttentionRows = self._memo["rows", last, only_new]
        return found

    def total(self, statistic: Statistic = attention) -> Tensor:
        """Sum a statistic ``[B, H, w, N]`` over all new queries, ``[B, H, N]``."""
        if ("total", statistic) not in self._memo:
            total = self.q.new_zeros(*self.q.shape[:2], self.k.shape[2], dtype=torch.float32)
            for heads, keys, rows in self._blocks():
                total[:, heads, keys] += rows.total(statistic)
            self._memo["total", statistic] = total
        summed: Tensor = self._memo["total", statistic]
        return summed

    def accumulated(self, name: str, new: Tensor) -> Tensor:
        """Add ``[..., N]`` to what was recorded under a name; returns and records the sum."""
        if name in self.memory:
            new = new + self.memory[name]
        self.memory[name] = new
        return new

    def latest(self, name: str, new: Tensor, counted: Tensor, last: int) -> Tensor:
        """Record rows ``[B, H, w, N]`` after those recorded before; returns and keeps the last ones.

        Args:
            name: what they are recorded under.
            new: rows, 0 where nothing counts.
            counted: ``[B, w]`` bool, the rows that exist, which are a sequence's last ones.
            last: rows to keep of each sequence.
        """
        if name in self.memory:
            before = self.memory[name].shape[2]
            new = torch.cat([self.memory[name], new], 2)
            # a sequence with fewer new rows than others keeps more of the earlier ones, right before the new ones
            missing = (~counted).sum(1, keepdim=True)
            columns = torch.arange(new.shape[2], device=new.device)
            order = torch.where(columns < before + missing, (columns - missing) % (before + missing), columns)
            new = new.gather(2, order[:, None, :, None].expand_as(new))
        self.memory[name] = new[:, :, -last:]
        return self.memory[name]

    @cached_property
    def _sorted_ranks(self) -> Tensor:
        """``[B, Hkv, N]`` ascending: free slots come last, and rank after everything."""
        return self.key_ranks.masked_fill(~self.key_valid, torch.iinfo(self.key_ranks.dtype).max).contiguous()

    def _spans(self, oldest: Tensor, newest: Tensor) -> list[tuple[int, int, int]]:
        """Return, for queries whose ranks go from ``oldest`` to ``newest`` ``[B, n]``, three slots for each n.

        Some query sees slots from the first to before the third; slots before the second are seen by all of them.
        """

        def slots(ranks: Tensor) -> Tensor:
            wanted = ranks[:, None].expand(-1, self.key_ranks.shape[1], -1).to(self.key_ranks.dtype)
            return torch.searchsorted(self._sorted_ranks, wanted.contiguous(), right=True)

        stop, open_until = slots(newest).amax((0, 1)), slots(oldest).amin((0, 1))
        start = torch.zeros_like(stop)
        if self.window is not None:
            start = open_until = slots(oldest - self.window).amin((0, 1))
        return list(zip(start.tolist(), open_until.tolist(), stop.tolist(), strict=True))

    def _blocks(self) -> Iterator[tuple[slice, slice, AttentionRows]]:
        """Visit the new queries in tiles; yields query heads, slots and the queries against those."""
        batch, kv_heads, held = self.key_ranks.shape
        tile = TILE.get(self.q.device.type, TILE["cuda"]) // (batch * self.group * held)
        width = min(max(tile, 16), BLOCK if self.q.device.type == "cpu" else 2 * BLOCK)
        heads = max(1, min(kv_heads, tile // width))
        precise = held <= PRECISE and self.q.device.type == "cpu" and not self.decoding
        tokens = self.q.shape[2]
        blocks = [slice(at, min(at + width, tokens)) for at in range(tokens - self.new, tokens, width)]
        ranks = [self.query_ranks[:, block] for block in blocks]
        spans = self._spans(torch.stack([x.amin(1) for x in ranks], 1), torch.stack([x.amax(1) for x in ranks], 1))
        for block, span in zip(blocks, spans, strict=True):
            for first in range(0, kv_heads if span[2] > span[0] else 0, heads):
                part = slice(first, first + heads)
                rows = self._rows(block, part, span, precise)
                yield slice(first * self.group, part.stop * self.group), slice(span[0], span[2]), rows

    def _rows(
        self, columns: Tensor | slice, heads: slice, span: tuple[int, int, int], precise: bool = False
    ) -> AttentionRows:
        """Return the queries in ``columns`` (``[B, w]``, or a range) against slots of some KV heads; see `_spans`.

        With ``precise`` the products are those of float64: in float32 a logit of 40 is off by 1e-5, and so is its
        weight. That shows where few rows decide, and costs little there.
        """
        start, open_until, stop = span
        keys = (self._precise_keys if precise else self._keys)[:, heads, start:stop]
        q = self._by_head(self.q, columns, heads).to(keys.dtype) * self.scaling
        batch, kv_heads, group, width, dim = q.shape
        s = (q.reshape(batch, kv_heads, -1, dim) @ keys.mT).float().view(batch, kv_heads, group, width, -1)
        ranks, counted = (
            x[:, columns] if isinstance(columns, slice) else x.gather(1, columns)
            for x in (self.query_ranks, self.query_valid)
        )
        distance = ranks[:, None, :, None] - self.key_ranks[:, heads, None, open_until:stop]
        hidden = (distance < 0) | ~self.key_valid[:, heads, None, open_until:stop]
        if self.window is not None:
            hidden = hidden | (distance >= self.window)
        s[..., open_until - start :].masked_fill_(hidden[:, :, None], float("-inf"))

        def values() -> Values:
            return self.values.part(heads, slice(start, stop))

        def outputs() -> Tensor | None:
            if self._outputs is None or not self._outputs_serve:
                return None
            return (self._by_head(self._outputs, columns, heads) - self.values.centre[:, heads, None]).flatten(1, 2)

        return AttentionRows(s.flatten(1, 2), values, counted, open_until - start, outputs)

    def _by_head(self, x: Tensor, columns: Tensor | slice, heads: slice) -> Tensor:
        """Pick ``[B, Hkv', G, w, D]`` out of ``[B, H, T, D]``."""
        x = x.unflatten(1, (-1, self.group))[:, heads]
        if isinstance(columns, slice):
            return x[..., columns, :]
        index = columns[:, None, None, :, None].expand(*x.shape[:3], -1, x.shape[-1])
        return x.gather(3, index)
