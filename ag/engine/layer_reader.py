"""Reads one layer in one pass: the inputs that the parts of a policy declare, computed in float32 and only once.

Nothing here has n^2 memory. Sums over all queries come from a kernel that sums as it goes, or are added up in tiles of
queries. Whole attention rows exist only for a window of the last queries.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ag import retention
from ag.engine.attention_rows import (
    FUSED,
    INF,
    CentredValues,
    Statistic,
    attention_rows,
    moments_over_queries,
    sum_over_queries,
)
from ag.engine.cached_kv import CachedKV
from ag.engine.scorer_inputs import COLUMNS, Needs, QueryRows, ScorerInputs, UnrotatedQueries
from ag.kernels.attention_stats import attention_stats
from ag.kernels.softmax import PLAIN, Softmax

Result = TypeVar("Result")

TILE_QUERIES = 64  # queries of a tile on a CPU
TILE = {"cpu": 2**20, "cuda": 2**27}  # elements of a tile that fits the caches, or that keeps a GPU busy


class Span(NamedTuple):
    """Slots that some queries see."""

    start: int  # the first slot that some query sees
    open_until: int  # every query sees the slots from the start to before this one
    stop: int  # one past the last slot that some query sees


@dataclass(kw_only=True, eq=False)
class LayerReader:
    """The cached tokens of a layer, and the queries whose attention its scorer may read.

    Attributes:
        cached: keys and values by slot.
        rotated_queries: ``[B, H, T, D]``, as RoPE rotated them: the new queries, and before them the remembered ones.
        query_indices: ``[B, T]`` long, token index of each query.
        query_valid: ``[B, T]`` bool, False on padding.
        num_new: new queries, which come last.
        lengths: ``[B]`` long, tokens of each sequence so far: one more than the token index of its newest query.
        max_length: an upper bound of the lengths, on the host.
        prompt_lengths: ``[B]`` long, tokens of each prompt; a budget may be a share of them.
        scaling: factor of the logits.
        step_weights: attention weights ``[B, H, N]`` of a single new query, 0 for padding. None: not known.
        softmax: cap and sink logits of the model.
        layer: index of the layer.
        sliding_window: the model's sliding window in the layer. None: the layer has none.
        log_retention: see :class:`ScorerInputs`, as the next two.
        caller_protected: None: the caller protects no token.
        prompt_sums: kept from pass to pass.
        decoding: whether the prompt is over.
        rotate: ``rotate(x, offsets, span=1)``, see :class:`ScorerInputs`.
        load_output_projection: returns the output projection by query head, ``[H, D, M]``.
        memo: results by key, for all parts of a policy and all caches that share the pass.
    """

    cached: CachedKV
    rotated_queries: Tensor
    query_indices: Tensor
    query_valid: Tensor
    num_new: int
    lengths: Tensor
    max_length: int
    prompt_lengths: Tensor
    scaling: float
    step_weights: Tensor | None
    softmax: Softmax = PLAIN
    layer: int
    sliding_window: int | None
    log_retention: bool
    caller_protected: Tensor | None
    prompt_sums: dict[str, Tensor]
    decoding: bool
    rotate: Callable[..., Tensor]
    load_output_projection: Callable[[], Tensor]
    memo: dict[Hashable, Any]

    def of_sequences(self, sequences: Tensor) -> LayerReader:
        """Return a reader of some sequences ``[b]`` long in a step; it has no sums over prompts."""
        by_sequence = "rotated_queries", "query_indices", "query_valid", "lengths", "prompt_lengths"
        parts = {name: getattr(self, name)[sequences] for name in by_sequence}
        for name in ("step_weights", "caller_protected"):
            whole = getattr(self, name)
            parts[name] = None if whole is None else whole[sequences]
        return replace(self, cached=self.cached.of_sequences(sequences), **parts, prompt_sums={}, memo={})

    def inputs(
        self,
        needs: Needs,
        records: Mapping[str, Tensor],
        evicting: Tensor | None = None,
        only_noted: bool = False,
    ) -> ScorerInputs:
        """Return the inputs of a part of a policy.

        Args:
            needs: the declaration of the part.
            records: records that the scorer has noted.
            evicting: ``[B]`` bool, the sequences to evict from. None: no sequence.
            only_noted: compute only the inputs that ``note`` reads of every query.
        """
        inputs = ScorerInputs(
            layer=self.layer,
            group=self.group,
            lengths=self.lengths,
            decoding=self.decoding,
            records=MappingProxyType(records),
            evicting=evicting,
            log_retention=self.log_retention,
            scaling=self.scaling,
            sink_logits=self.softmax.sinks,
            prompt_sums=self.prompt_sums,
            memo=self.memo,
            mean_over_layer=self.mean_over_layer,
            rotate=self.rotate,
        )
        # a name is a property here, or a method if the need has a size: attention_sums=32 calls attention_sums(needs)
        for name in needs.every_query if only_noted else needs.declared:
            value = getattr(self, name)
            setattr(inputs, name, value(needs) if callable(value) else value)
        return inputs

    # ---- cached tokens

    @property
    def group(self) -> int:
        """Query heads of each KV head."""
        return self.rotated_queries.shape[1] // self.cached.shape[1]

    @property
    def keys(self) -> Tensor:
        """``[B, Hkv, N, D]``, undefined on free slots."""
        return self.cached.keys

    @cached_property
    def keys_float32(self) -> Tensor:
        """Keys ``[B, Hkv, N, D]`` in float32, undefined on free slots."""
        return self.cached.keys.float()

    @cached_property
    def values(self) -> Tensor:
        """``[B, Hkv, N, D]`` float32, 0 on free slots."""
        return self.cached.values.float().masked_fill(~self.occupied[..., None], 0.0)

    @cached_property
    def centred_values(self) -> CentredValues:
        """The values, and the products that statistics read of each."""
        return CentredValues.of(self.values, self.occupied)

    @property
    def key_indices(self) -> Tensor:
        """``[B, Hkv, N]`` long, the token index of each slot, undefined on free slots."""
        return self.cached.token_indices

    @property
    def distinct_indices(self) -> Tensor:
        """``[B, Hkv or 1, N]`` long: the key indices, of one head if all heads hold equal tokens."""
        indices = self.cached.token_indices
        return indices[:, :1] if self.cached.same_for_all_heads else indices

    @cached_property
    def occupied(self) -> Tensor:
        """``[B, Hkv, N]`` bool, the slots that hold a token."""
        return self.cached.token_indices >= 0

    @property
    def expired(self) -> Tensor | None:
        """``[B, Hkv or 1, N]`` bool, tokens that left the sliding window. None: the layer has no sliding window."""
        window = self.sliding_window
        return None if window is None else retention.expired_mask(self.distinct_indices, self.lengths, window)

    @cached_property
    def key_valid(self) -> Tensor:
        """``[B, Hkv, N]`` bool, the occupied slots whose token has not left the sliding window."""
        expired = self.expired
        return self.occupied if expired is None else self.occupied & ~expired

    @cached_property
    def slot_order(self) -> Tensor | None:
        """``[B, Hkv, N]`` long, slots by ascending token index, free slots last. None: they are in this order."""
        if self.cached.in_order:
            return None
        return order_slots(self.cached.token_indices)

    @property
    def gate_logits(self) -> Tensor:
        """``[B, Hkv, N]`` float32, 0 on free slots."""
        return self.cached.gate_outputs.masked_fill(~self.occupied, 0.0)

    @property
    def output_projection(self) -> Tensor:
        """``[H, D, M]`` float32, the output projection by query head."""
        return self.load_output_projection()

    def mean_over_layer(self, x: Tensor) -> Tensor:
        """Average ``[B, H, N]`` over all query heads by token; see :class:`ScorerInputs`."""
        kv_heads = self.cached.shape[1]
        if self.cached.same_for_all_heads:  # equal slots hold equal tokens
            return x.mean(1, keepdim=True).expand(-1, kv_heads, -1)
        columns = -(-self.max_length // COLUMNS) * COLUMNS
        by_kv_head = x.unflatten(1, (kv_heads, -1)).sum(2).masked_fill(~self.occupied, 0.0)
        indices = self.cached.token_indices.clamp(0, columns - 1)
        by_token = x.new_zeros(len(x), columns)
        by_token.scatter_add_(1, indices.flatten(1), by_kv_head.flatten(1))
        return (by_token[:, None].expand(-1, kv_heads, -1) / self.rotated_queries.shape[1]).gather(2, indices)

    # ---- queries and their attention

    @cached_property
    def queries(self) -> UnrotatedQueries:
        """The queries without their rotation."""
        # If all queries of a sequence lie some tokens further on, that rotates statistics and future positions alike.
        vectors = self.rotate(self.rotated_queries.float(), -self.query_indices[:, None])
        return UnrotatedQueries(vectors, self.query_indices, self.query_valid, self.num_new)

    def attention_sums(self, needs: Needs) -> Tensor:
        """Return the declared statistic summed over the declared queries, ``[B, H, N]``."""
        last, statistic = needs.attention_sums, needs.statistic
        if last == "new" or (last == 1 and self.decoding and self.rotated_queries.shape[2] == 1):
            if statistic is None and self.step_weights is not None:
                return self.step_weights
            return self._compute_once(("sums", statistic), lambda: self._sum_over_new(statistic))
        assert last is not None
        rows = self._last_rows(last, False, statistic)
        return self._compute_once(("sums", last, statistic), lambda: sum_over_queries(*rows))

    def attention_rows(self, needs: Needs) -> QueryRows:
        """Return the declared statistic of the declared queries."""
        assert needs.attention_rows is not None
        return self._last_rows(needs.attention_rows, needs.only_new, needs.statistic)

    def attention_logits(self, needs: Needs) -> QueryRows:
        """Return the logits of the declared queries."""
        assert needs.attention_logits is not None
        return self._last_logits(needs.attention_logits, needs.only_new)

    def attention_moments(self, needs: Needs) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the weights over the declared queries."""
        last = needs.attention_moments
        assert last is not None
        rows = self._last_rows(last, False, None)
        return self._compute_once(("moments", last), lambda: moments_over_queries(*rows))

    def _compute_once(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Return the result of the first call with this key, for all caches that share the pass."""
        if key not in self.memo:
            self.memo[key] = compute()
        result: Result = self.memo[key]
        return result

    def _last_rows(self, last: int, only_new: bool, statistic: Statistic | None) -> QueryRows:
        """Return weights, or a statistic of them, of each sequence's ``last`` newest queries."""

        def compute() -> QueryRows:
            logits, valid = self._last_logits(last, only_new)
            return QueryRows(self._rows(logits, statistic, slice(None), slice(None)), valid)

        return self._compute_once(("rows", last, only_new, statistic), compute)

    def _last_logits(self, last: int, only_new: bool) -> QueryRows:
        """Return the logits of each sequence's ``last`` newest queries, or of all if there are fewer, oldest first.

        ``only_new`` leaves out queries of earlier passes.
        """

        def compute() -> QueryRows:
            num_queries = self.rotated_queries.shape[2]
            chosen = self.query_valid & (self.query_indices >= (self.lengths - last)[:, None])
            if only_new:
                chosen[:, : num_queries - self.num_new] = False
            width = min(last, self.num_new if only_new else num_queries)
            order = torch.where(chosen, self.query_indices, -1).argsort(dim=1, stable=True)[:, -width:]
            logits = self._logits(order, slice(None), Span(0, 0, self.cached.shape[2]))
            return QueryRows(logits, chosen.gather(1, order))

        return self._compute_once(("logits", last, only_new), compute)

    def _sum_over_new(self, statistic: Statistic | None) -> Tensor:
        """Sum a statistic over all new queries, ``[B, H, N]``: by a kernel if there is one, else tile by tile."""
        kind = FUSED.get(statistic)
        if kind is not None and self.num_new > 1:
            new = slice(self.rotated_queries.shape[2] - self.num_new, None)
            query_indices = self.query_indices[:, new].masked_fill(~self.query_valid[:, new], -1)
            arguments = self.rotated_queries[:, :, new], self.keys, query_indices, self.key_indices, self.scaling
            sums = attention_stats(kind, *arguments, self.sliding_window, softmax=self.softmax).float()
            if kind == "sum":
                return sums
            return sums * self.centred_values.squared_norms.repeat_interleave(self.group, 1)
        shape = *self.rotated_queries.shape[:2], self.cached.shape[2]
        total = self.rotated_queries.new_zeros(shape, dtype=torch.float32)
        for queries, kv_heads, span in self._tiles():
            logits, slots = self._logits(queries, kv_heads, span), slice(span.start, span.stop)
            rows = self._rows(logits, statistic, kv_heads, slots, span.open_until - span.start)
            total[:, self._query_heads(kv_heads), slots] += sum_over_queries(rows, self.query_valid[:, queries])
        return total

    def _tiles(self) -> Iterator[tuple[slice, slice, Span]]:
        """Yield tiles of the new queries: columns of queries, KV heads, and the slots that these queries see."""
        batch, kv_heads, num_slots = self.cached.shape
        device = self.rotated_queries.device.type
        tile = TILE.get(device, TILE["cuda"]) // (batch * self.group * max(num_slots, 1))
        width = min(max(tile, 16), TILE_QUERIES if device == "cpu" else 2 * TILE_QUERIES)
        heads, num_queries = max(1, min(kv_heads, tile // width)), self.rotated_queries.shape[2]
        starts = range(num_queries - self.num_new, num_queries, width)
        columns = [slice(start, min(start + width, num_queries)) for start in starts]
        for queries, span in zip(columns, self._spans(columns), strict=True):
            for first in range(0, kv_heads if span.stop > span.start else 0, heads):
                yield queries, slice(first, min(first + heads, kv_heads)), span

    def _spans(self, columns: list[slice]) -> list[Span]:
        """Return the slots that ranges of queries see: all slots, unless slots are in the order of the tokens."""
        slots = self.cached.shape[2]
        if not self.cached.in_order:
            return [Span(0, 0, slots)] * len(columns)
        token_indices = [self.query_indices[:, queries] for queries in columns]
        ends = torch.stack([torch.stack([x.min(), x.max()]) for x in token_indices]).add(1).clamp_max(slots)
        if self.sliding_window is None:
            return [Span(0, open_until, stop) for open_until, stop in ends.tolist()]
        starts = (ends[:, 0] - self.sliding_window).clamp_min(0).tolist()
        return [Span(start, start, stop) for start, stop in zip(starts, ends[:, 1].tolist(), strict=True)]

    def _query_heads(self, kv_heads: slice) -> slice:
        """Return the query heads of some KV heads."""
        first, stop, _ = kv_heads.indices(self.cached.shape[1])
        return slice(first * self.group, stop * self.group)

    def _logits(self, columns: Tensor | slice, kv_heads: slice, span: Span) -> Tensor:
        """Return the logits ``[B, H', w, N']`` of some queries, -inf where the query does not see the slot.

        Args:
            columns: the queries: ``[B, w]`` of each sequence, or a range for all sequences.
            kv_heads: the KV heads whose query heads attend.
            span: the slots.
        """
        start, open_until, stop = span
        keys = self.keys_float32[:, kv_heads, start:stop]
        q = self.rotated_queries.unflatten(1, (-1, self.group))[:, kv_heads]  # [B, Hkv', G, T, D]
        if isinstance(columns, slice):
            q, token_indices = q[..., columns, :], self.query_indices[:, columns]
        else:
            q = q.gather(3, columns[:, None, None, :, None].expand(*q.shape[:3], -1, q.shape[-1]))
            token_indices = self.query_indices.gather(1, columns)
        batch, num_kv_heads, group, _, dim = q.shape
        scaled = (q.to(keys.dtype) * self.scaling).reshape(batch, num_kv_heads, -1, dim)
        logits = self.softmax.capped((scaled @ keys.mT).unflatten(2, (group, -1)))
        if open_until < stop:
            slots = slice(open_until, stop)
            distance = token_indices[:, None, :, None] - self.cached.token_indices[:, kv_heads, None, slots]
            hidden = (distance < 0) | ~self.occupied[:, kv_heads, None, slots]
            if self.sliding_window is not None:
                hidden = hidden | (distance >= self.sliding_window)
            logits[..., open_until - start :].masked_fill_(hidden[:, :, None], -INF)
        return logits.flatten(1, 2)

    def _rows(
        self, logits: Tensor, statistic: Statistic | None, kv_heads: slice, slots: slice, open_until: int = 0
    ) -> Tensor:
        """Return weights, or a statistic of them, of logits ``[B, H', w, N']`` of some KV heads and slots."""
        values = None if statistic is None else self.centred_values.part(kv_heads, slots)
        sink_logits = self.softmax.of_heads(self._query_heads(kv_heads)).sinks
        return attention_rows(logits, statistic, values, open_until, sink_logits)


def order_slots(token_indices: Tensor) -> Tensor:
    """Return slots ``[B, Hkv, N]`` long by ascending token index; free slots, whose index is -1, come last."""
    order: Tensor = token_indices.masked_fill(token_indices < 0, torch.iinfo(token_indices.dtype).max).argsort(-1)
    return order
