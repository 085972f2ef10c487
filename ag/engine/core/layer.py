"""One layer of the cache: append, attend, observe, evict."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ag.engine.core.evictor import Evictor
from ag.engine.core.kv_store import KVStore
from ag.engine.core.sequences import ForwardBatch
from ag.engine.lookback import Lookback
from ag.engine.observe import Keys, Observation, Queries
from ag.engine.policy import Policy
from ag.gates.gate import AttentionGates
from ag.gates.memory import GateMemory
from ag.kernels.paged_attend import paged_attend
from ag.kernels.paged_decode import paged_decode, paged_decode_weights
from ag.kernels.pages import decoded
from ag.model.hooks import AttentionCall, rotate
from ag.model.projection import output_weight

EXPIRED = 64  # tokens that a row may hold beyond what a later query sees, before they are removed


class Layer:
    """What a layer does with a pass; the rows themselves lie in the cache's store.

    Args:
        policy: of the cache.
        decoder: the model's stack of layers.
        index: of the layer.
        gates: of the model; None where this layer has no gate.
    """

    def __init__(self, policy: Policy, decoder: Any, index: int, gates: AttentionGates | None) -> None:
        self.index, self.policy, self.decoder, self.gates = index, policy, decoder, gates
        #: Newest tokens that a query sees whatever their flags, its own included; None means that flags do not count.
        self.flagged = None if gates is None or policy.budget is not None else gates.config.recent_tokens
        #: Sliding window of the model's layer; None means that it has none.
        self.window: int | None = None
        #: The last queries of each sequence, for scorers that look back at them.
        self.lookback = Lookback()
        self._open_to = 0  # tokens of the longest row when those that no query sees were last removed
        #: What the layer's gate looks back at.
        self.gate_memory = GateMemory(0 if gates is None else gates.config.window)

    def run(self, call: AttentionCall, batch: ForwardBatch, store: KVStore, evictor: Evictor | None) -> Tensor:
        """Take a pass.

        Args:
            call: queries, keys and values of the new tokens.
            batch: the pass.
            store: rows of all layers.
            evictor: decides what goes; None where this layer is not evicted from in this pass.

        Returns:
            The attention output ``[B, H, T, Dv]``.
        """
        self.window = call.window
        if not batch.step:  # a step made room in all layers at once
            store.make_room(slice(self.index, self.index + 1), batch.counts)
            store.held[self.index] += batch.counts[:, None]
        store.append(self.index, call.k, call.v, batch.ranks, self._gate_output(batch))
        out, weights = self._attend(call, batch, store, self._weighs(batch, evictor))
        if evictor is not None:
            self._observe(call, batch, store, evictor, out, weights)
        self._expire(batch, store)
        return out

    # ---- attend

    def _attend(
        self, call: AttentionCall, batch: ForwardBatch, store: KVStore, weighs: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and for a single query its weights ``[B, H, S]`` by slot where they are asked for."""
        pages, recent = store.pages(self.index), self.flagged
        if recent is not None and batch.is_prefill and self.gates is not None and self.gates.config.prefill == "dense":
            recent = None
        if batch.fresh and recent is None:  # left-aligned: padding comes last, where no token sees it
            return call.dense(None, left_padded=False), None
        if batch.step and call.window is None and recent is None:
            if weighs:
                return paged_decode_weights(call.q, pages, call.scaling, call.softmax)
            return paged_decode(call.q, pages, call.scaling, call.softmax), None
        return paged_attend(call.q, pages, batch.ranks, call.scaling, call.window, recent, call.softmax), None

    def _weighs(self, batch: ForwardBatch, evictor: Evictor | None) -> bool:
        """Tell whether the scorer is shown the attention of one query to all that is held."""
        if evictor is None or not evictor.scorer.needs.rows:
            return False
        return batch.evict is not None or evictor.scorer.needs.every_query

    def _gate_output(self, batch: ForwardBatch) -> Tensor | None:
        """Return what is stored of the gate beside the new tokens, ``[B, Hkv, T]``; None where it was not asked."""
        logits: Tensor | None = batch.memo.pop(("logits", self.index), None)
        if logits is None or self.gates is None:
            return None
        if self.flagged is None:
            return self.gates.stored(logits)
        flags = self.gates.flags(logits) | (batch.ranks < self.gates.config.sink_tokens)[:, None]
        stays = _protected(batch, batch.ranks)
        return flags if stays is None else flags | stays[:, None]

    # ---- observe and evict

    def _observe(
        self,
        call: AttentionCall,
        batch: ForwardBatch,
        store: KVStore,
        evictor: Evictor,
        out: Tensor,
        weights: Tensor | None,
    ) -> None:
        """Show the scorer the pass, and evict where it is time."""
        needs = evictor.scorer.needs
        there = batch.ranks >= 0
        queries = Queries(
            q=call.q, ranks=batch.ranks, valid=there, new=call.q.shape[2], padded=not batch.step and batch.padded,
            outputs=out, weights=weights,
        )  # fmt: skip
        last = self.policy.lookback if batch.is_prefill else needs.lookback
        if last:
            queries = self.lookback.before(queries)
            self.lookback.remember(queries, last)
        if batch.evict is None and not needs.every_query:
            return
        records = store.records[self.index]
        seen = self._seen(call, batch, store, queries)
        slots = seen.keys.ranks.shape[-1]
        short = {name: x[..., :slots] for name, x in records.items()}  # what scorers see has no free slots behind
        seen.recorded = MappingProxyType(short)
        if batch.evict is not None:
            evictor.evict(seen, batch, store, short)
        else:
            evictor.scorer.note(seen, short)
            store.put_records(self.index, short)

    def _seen(self, call: AttentionCall, batch: ForwardBatch, store: KVStore, queries: Queries) -> Observation:
        if batch.fresh:
            heads = call.k.shape[1]
            ranks = batch.ranks[:, None].expand(-1, heads, -1)
            gate = None if store.gate_type is None else self._gates_of(store, store.index(self.index, ranks.shape[-1]))
            stored: Callable[[], tuple[Tensor, Tensor]] = lambda: (call.k, call.v)  # noqa: E731
        else:
            index, ranks = store.ledger(self.index, store.slots if batch.step else None)
            gate = None if store.gate_type is None else self._gates_of(store, index)
            stored = partial(_gathered, store, self.index, index)
            if call.window is not None:  # queries that are looked back at do not see what no new query sees
                first = (batch.num_tokens - batch.counts).to(ranks.device)[:, None, None]
                ranks = ranks.masked_fill(ranks <= first - call.window, -1)
        valid = ranks >= 0
        device = call.q.device
        lengths = queries.ranks[:, -1] + 1 if batch.step else batch.num_tokens.to(device)
        return Observation(
            keys=Keys(
                stored=stored,
                ranks=ranks,
                valid=valid,
                full=call.window is None and bool((store.held[self.index] == ranks.shape[-1]).all()),
                whole=batch.fresh,
                ordered=batch.fresh,
                alike=batch.fresh,
            ),
            queries=queries,
            scaling=call.scaling,
            softmax=call.softmax,
            layer=self.index,
            sliding_window=call.window,
            gate=None if gate is None else gate.masked_fill(~valid, 0.0),
            decays=self.gates is not None and self.gates.decays,
            own_prompt=batch.prompt_len.to(device),
            stays=_protected(batch, ranks),
            decoding=not batch.is_prefill,
            precise=self.policy.scorer is not None and self.policy.scorer.needs.precise,
            rotation=lambda x, places, span: rotate(self.decoder, x, places, span, self.index),
            projection=lambda: output_weight(call.module, call.q.shape[1]),
            memo=call.memo,
            memo_of_pass=batch.memo,
            tokens_seen=lengths,
            columns=int(batch.num_tokens.max()),
        )

    def _gates_of(self, store: KVStore, index: Tensor) -> Tensor:
        assert store.gate_type is not None
        return store.pool.gate(store.gate_type).flatten()[index]

    # ---- what no later query sees

    def _expire(self, batch: ForwardBatch, store: KVStore) -> None:
        """Remove what left the sliding window, and what is neither flagged nor recent, once that is much."""
        if self.window is None and self.flagged is None:
            return
        held = store.held[self.index]
        most = self._open_to + EXPIRED if self.flagged is not None else (self.window or 0) - 1 + EXPIRED
        if not batch.ends_prompt and int(held.max()) < most:
            return
        index, ranks = store.ledger(self.index)
        length = batch.num_tokens.to(ranks.device)[:, None, None]
        keep = ranks >= 0
        if self.window is not None:
            keep &= ranks > length - self.window
        if self.flagged is not None:
            keep &= (ranks > length - self.flagged) | (self._gates_of(store, index) > 0)
        kept = keep.sum(-1).cpu()
        if bool((kept < held).any()):
            store.compact(self.index, keep, kept)
            batch.memo["expired"] = True
        self._open_to = int(kept.max())

    # ---- sequences

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        self.lookback.select(indices)
        self.gate_memory.select(indices)


def _gathered(store: KVStore, layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values ``[B, Hkv, N, D]`` at places of the pool."""
    pages = store.pages(layer)
    keys, values = (x.flatten(0, 1)[index] for x in (pages.keys, pages.values))
    return decoded(pages, keys, values)


def _protected(batch: ForwardBatch, ranks: Tensor) -> Tensor | None:
    """Return which slots hold tokens that the caller protects, bool like the ranks ``[B, Hkv, N]``; None means none."""
    if batch.protected is None:
        return None
    marks = batch.protected.to(ranks.device)
    inside = (ranks >= 0) & (ranks < marks.shape[1])
    return inside & marks.gather(1, ranks.where(inside, 0).flatten(1)).view(ranks.shape)
