"""What scorers see of a layer: attention rows and sums over queries, in float32, on demand.

One object serves all parts of a policy. Nothing here has n^2 memory: all queries are visited in blocks, or by a kernel
that sums as it goes, and whole rows exist only for a window of the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ag import retention
from ag.engine.rows import FUSED, AttentionRows, Statistic, Values, attention
from ag.engine.shown import Keys
from ag.kernels.attention_stats import attention_stats
from ag.kernels.softmax import PLAIN, Softmax

Result = TypeVar("Result")

BLOCK = 64  # queries visited at once
COLUMNS = 1024  # by how many at a time a table of all tokens grows
TILE = {"cpu": 2**20, "cuda": 2**27}  # elements of a tile that fits the caches, or that keeps a GPU busy


class Span(NamedTuple):
    """Slots that some queries see."""

    start: int  # the first that some query sees
    open_until: int  # those from the start to before this one are seen by every query
    stop: int  # one past the last that some query sees


@dataclass(kw_only=True, eq=False)
class ScorerInputs:
    """Queries against the keys that a layer holds, for scorers and allocators.

    Attributes:
        keys: what is held.
        q: queries ``[B, H, T, D]``, post-RoPE: the new ones, and before them those that the policy looks back at.
        query_indices: ``[B, T]`` long, the place of each query among its sequence's own tokens.
        query_valid: ``[B, T]`` bool, False on padding.
        new: how many of the queries, at the end, were not shown before.
        lengths: ``[B]`` long, tokens that each sequence has seen, one more than the token index of its newest query.
        longest: bound of these numbers, on the host.
        prompt_lengths: ``[B]`` long, tokens of each prompt, to which shares of a budget refer.
        scaling: factor of the logits.
        weights: attention weights ``[B, H, N]`` of a single new query, 0 where it is padding; None means that they are
            not known.
        softmax: caps and sink logits of the model.
        layer: index of the layer.
        sliding_window: of the model's layer, or None.
        gate: logits ``[B, Hkv, N]`` of the layer's gate with its bias, or None; the largest number where no gate ran.
        decays: whether these are logs of probabilities, of what is left of a token's worth after each one that comes.
        marked: ``[B, M]`` bool, positions that the caller protects; None means none.
        decoding: whether the prompt is over.
        recorded: what the scorer noted, tensors ``[..., N]`` whose last dimension is that of the keys (tokens that came
            since have 0); None means that there are no records.
        sums: what the scorer summed over the queries of a prompt, ``[B, ...]`` by name, which it may change while the
            prompt is read; None means that nothing is remembered.
        rotation: what :meth:`turn` rotates by; None means that the model's rotations are not known.
        projection: gives :attr:`output`; None means that it is not known.
        memo: measurements, each made once.
        capacity: ``[B]`` long, tokens per KV head that the budget allows, the mean over layers; None means that there
            is no budget.
        due: ``[B]`` bool, sequences to evict from now; None means all.
    """

    keys: Keys
    q: Tensor
    query_indices: Tensor
    query_valid: Tensor
    new: int
    lengths: Tensor
    longest: int
    prompt_lengths: Tensor
    scaling: float
    weights: Tensor | None = None
    softmax: Softmax = PLAIN
    layer: int = 0
    sliding_window: int | None = None
    gate: Tensor | None = None
    decays: bool = False
    marked: Tensor | None = None
    decoding: bool = False
    recorded: Mapping[str, Tensor] | None = None
    sums: dict[str, Tensor] | None = None
    rotation: Callable[[Tensor, Tensor, int], Tensor] | None = None
    projection: Callable[[], Tensor] | None = None
    memo: dict[Hashable, Any] = field(default_factory=dict)
    capacity: Tensor | None = None
    due: Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads a KV head, G."""
        return self.q.shape[1] // self.keys.shape[1]

    @cached_property
    def key_indices(self) -> Tensor:
        """``[B, Hkv, N]`` long, the place of each key among its sequence's own tokens."""
        return self.keys.token_indices.long()

    @property
    def k(self) -> Tensor:
        """Keys ``[B, Hkv, N, D]``; anything on free slots."""
        return self.keys.k

    @cached_property
    def key_valid(self) -> Tensor:
        """``[B, Hkv, N]`` bool, the slots that hold a token which some later query sees."""
        expired = self.expired
        return self.keys.valid if expired is None else self.keys.valid & ~expired

    @property
    def expired(self) -> Tensor | None:
        """``[B, Hkv or 1, N]`` bool, tokens that left the sliding window; None without one."""
        window = self.sliding_window
        return None if window is None else retention.expired_mask(self.positions, self.lengths, window)

    @property
    def values(self) -> Values:
        """Values of the held keys, centred."""
        return self.keys.values

    @property
    def v(self) -> Tensor:
        """Values ``[B, Hkv, N, D]`` float32, 0 on free slots."""
        return self.values.v

    @cached_property
    def age(self) -> Tensor:
        """``[B, Hkv, N]`` long: 0 for the newest token of a sequence, 1 for the one before; any on free slots."""
        return self.lengths[:, None, None] - 1 - self.key_indices

    @property
    def positions(self) -> Tensor:
        """``[B, Hkv or 1, N]``, the position of each key; of one head where all hold the same."""
        return self.keys.token_indices[:, :1] if self.keys.alike else self.keys.token_indices

    @cached_property
    def output(self) -> Tensor:
        """The layer's output projection by query head, ``[H, D, M]`` float32, without its bias."""
        assert self.projection is not None
        return self.projection()

    def turn(self, x: Tensor, offsets: Tensor, span: int = 1) -> Tensor:
        """Rotate queries or keys ``[B, H, n, D]`` further by places ``[B, 1, n or 1]``, as the model's RoPE does.

        Negative places turn back. Rotations of ``span`` places, from each one on, are averaged.
        """
        assert self.rotation is not None
        return self.rotation(x, offsets, span)

    def over_layer(self, values: Tensor) -> Tensor:
        """Average ``[B, H, N]`` over all query heads by token, and give it to each KV head, ``[B, Hkv, N]``.

        Heads may hold different tokens; one that no longer holds a token contributes 0 for it.
        """
        kv_heads = self.keys.shape[1]
        if self.keys.alike:  # nothing to look up
            return values.mean(1, keepdim=True).expand(-1, kv_heads, -1)
        tokens = -(-self.longest // COLUMNS) * COLUMNS
        values = values.unflatten(1, (kv_heads, -1)).sum(2).masked_fill(~self.keys.valid, 0.0)
        indices = self.key_indices.clamp(0, tokens - 1)
        by_token = values.new_zeros(len(values), tokens)
        by_token.scatter_add_(1, indices.flatten(1), values.flatten(1))
        return (by_token[:, None].expand(-1, kv_heads, -1) / self.q.shape[1]).gather(2, indices)

    def rows(self, last: int, only_new: bool = False) -> AttentionRows:
        """Return the last ``last`` queries of each sequence, or as many as there are, oldest first.

        With ``only_new`` those that were shown before are left out.
        """
        return self.once(("rows", last, only_new), lambda: self._last_rows(last, only_new))

    def total(self, statistic: Statistic = attention) -> Tensor:
        """Sum a statistic ``[B, H, w, N]`` over all new queries, ``[B, H, N]``."""
        if statistic is attention and self.weights is not None:
            return self.weights
        return self.once(("total", statistic), lambda: self._total(statistic))

    def newest(self, statistic: Statistic = attention) -> Tensor:
        """Return a statistic of each sequence's newest query, ``[B, H, N]``."""
        alone = self.decoding and self.q.shape[2] == 1
        return self.total(statistic) if alone else self.rows(1).total(statistic)

    def once(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Return what ``make`` made at the first call with this key, for all policies that share the pass."""
        if key not in self.memo:
            self.memo[key] = make()
        result: Result = self.memo[key]
        return result

    def _last_rows(self, last: int, only_new: bool) -> AttentionRows:
        chosen = self.query_valid & (self.query_indices >= (self.lengths - last)[:, None])
        if only_new:
            chosen[:, : self.q.shape[2] - self.new] = False
        width = min(last, self.new if only_new else self.q.shape[2])
        order = torch.where(chosen, self.query_indices, -1).argsort(dim=1, stable=True)[:, -width:]
        rows = self._rows(order, slice(None), Span(0, 0, self.keys.shape[2]))
        rows.counted = chosen.gather(1, order)
        return rows

    def _total(self, statistic: Statistic) -> Tensor:
        kind = FUSED.get(statistic)
        if kind is not None and self.new > 1:
            new = slice(self.q.shape[2] - self.new, None)
            own = self.query_indices[:, new].masked_fill(~self.query_valid[:, new], -1)
            key_indices = self.key_indices.masked_fill(~self.keys.valid, -1)
            arguments = self.q[:, :, new], self.k, own, key_indices, self.scaling, self.sliding_window
            sums = attention_stats(kind, *arguments, softmax=self.softmax).float()
            return sums if kind == "sum" else sums * self.values.norms.repeat_interleave(self.group, 1)
        total = self.q.new_zeros(*self.q.shape[:2], self.keys.shape[2], dtype=torch.float32)
        for heads, keys, rows in self._tiles():
            total[:, heads, keys] += rows.total(statistic)
        return total

    def _tiles(self) -> Iterator[tuple[slice, slice, AttentionRows]]:
        """Visit the new queries in tiles; yields query heads, slots and the queries against those."""
        batch, kv_heads, num_slots = self.keys.shape
        tile = TILE.get(self.q.device.type, TILE["cuda"]) // (batch * self.group * max(num_slots, 1))
        width = min(max(tile, 16), BLOCK if self.q.device.type == "cpu" else 2 * BLOCK)
        heads, tokens = max(1, min(kv_heads, tile // width)), self.q.shape[2]
        blocks = [slice(at, min(at + width, tokens)) for at in range(tokens - self.new, tokens, width)]
        for block, span in zip(blocks, self._spans(blocks), strict=True):
            for first in range(0, kv_heads if span.stop > span.start else 0, heads):
                part = slice(first, min(first + heads, kv_heads))
                rows = self._rows(block, part, span)
                yield slice(first * self.group, part.stop * self.group), slice(span.start, span.stop), rows

    def _spans(self, blocks: list[slice]) -> list[Span]:
        """Return the slots that blocks of queries see; where slots are not ordered by token index, all of them."""
        slots = self.keys.shape[2]
        if not self.keys.ordered:
            return [Span(0, 0, slots)] * len(blocks)
        token_indices = [self.query_indices[:, block] for block in blocks]
        ends = torch.stack([torch.stack([x.min(), x.max()]) for x in token_indices]).add(1).clamp_max(slots)
        if self.sliding_window is None:
            return [Span(0, open_until, stop) for open_until, stop in ends.tolist()]
        starts = (ends[:, 0] - self.sliding_window).clamp_min(0).tolist()
        return [Span(start, start, stop) for start, stop in zip(starts, ends[:, 1].tolist(), strict=True)]

    def _rows(self, columns: Tensor | slice, heads: slice, span: Span) -> AttentionRows:
        """Return the queries in ``columns`` (``[B, w]``, or a range) against the slots of a span, of some KV heads."""
        cached, group = self.keys, self.group  # what comes of it outlives this observation
        start, open_until, stop = span
        keys = cached.single[:, heads, start:stop]
        q = self.q.unflatten(1, (-1, group))[:, heads]  # [B, Hkv', G, T, D]
        token_indices, counted = self.query_indices, self.query_valid
        if isinstance(columns, slice):
            q, token_indices, counted = q[..., columns, :], token_indices[:, columns], counted[:, columns]
        else:
            q = q.gather(3, columns[:, None, None, :, None].expand(*q.shape[:3], -1, q.shape[-1]))
            token_indices, counted = token_indices.gather(1, columns), counted.gather(1, columns)
        batch, kv_heads, group, width, dim = q.shape
        s = ((q.to(keys.dtype) * self.scaling).reshape(batch, kv_heads, -1, dim) @ keys.mT).unflatten(2, (group, -1))
        s = self.softmax.capped(s)
        if open_until < stop:
            distance = token_indices[:, None, :, None] - self.key_indices[:, heads, None, open_until:stop]
            hidden = (distance < 0) | ~cached.valid[:, heads, None, open_until:stop]
            if self.sliding_window is not None:
                hidden = hidden | (distance >= self.sliding_window)
            s[..., open_until - start :].masked_fill_(hidden[:, :, None], float("-inf"))

        def values() -> Values:
            return cached.values.part(heads, slice(start, stop))

        first = heads.start or 0
        softmax = self.softmax.of_heads(slice(first * group, (first + kv_heads) * group))
        return AttentionRows(s.flatten(1, 2), values, counted, open_until - start, softmax.sinks)
