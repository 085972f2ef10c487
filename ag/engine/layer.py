"""One layer of the cache: append, attend, observe, evict."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ag import retention
from ag.engine.block_pool import PoolFullError
from ag.engine.cached_kv import CachedKV
from ag.engine.evictor import Evictor, Stopwatch
from ag.engine.forward_batch import ForwardBatch, PendingEviction
from ag.engine.kv_store import KVStore
from ag.engine.layer_reader import LayerReader
from ag.engine.observation_window import ObservationWindow, Queries
from ag.engine.policy import Policy
from ag.errors import UserError
from ag.gates.gate import AttentionGate, AttentionGates
from ag.gates.memory import GateMemory
from ag.kernels.gated_prefill import gated_prefill
from ag.kernels.kv_append import kv_append
from ag.kernels.paged_attention import paged_attention
from ag.model.interceptor import AttentionCall
from ag.model.projection import output_weight
from ag.model.rope import rotate

MAX_EXPIRED = 64  # expired tokens, which no later query sees, that a row may hold before they are freed


class Layer:
    """The work of one layer in a pass; the rows themselves lie in a store of the cache.

    Args:
        policy: of the cache.
        decoder: the model's stack of layers.
        index: of the layer.
        gates: of the model; None means that this layer has no gate.
        num_kv_readers: number of later layers of the model that read the keys and values of this one.
    """

    def __init__(
        self, policy: Policy, decoder: Any, index: int, gates: AttentionGates | None, num_kv_readers: int
    ) -> None:
        self.num_kv_readers = num_kv_readers
        self.index, self.policy, self.decoder, self.gates = index, policy, decoder, gates
        #: Newest tokens that a query sees whatever their flags, its own included. None: flags do not act.
        self.visible_unflagged = None if gates is None or policy.budget is not None else gates.config.recent_tokens
        #: Sliding window of the model's layer. None: it has none.
        self.window: int | None = None
        #: Tokens of the chunks of a text within which the layer attends. None: it attends to the whole text.
        self.chunk: int | None = None
        #: Whether cached tokens expire, so that no later query sees them: by a sliding window, or by flags.
        self.can_expire = self.visible_unflagged is not None
        #: The last queries of each sequence, for scorers that look back at them.
        self.observation_window = ObservationWindow()
        #: Tokens of the longest row after expired tokens were last freed.
        self.max_length_after_freeing = 0
        #: Time spent on scores and decisions.
        self.watch = Stopwatch()
        #: Keys and values of the layer's gate.
        self.gate_memory = GateMemory(0 if gates is None else gates.config.window)

    def run_gate(self, hidden: Tensor, batch: ForwardBatch) -> None:
        """Run the layer's gate on the hidden states ``[B, T, d]`` of the new tokens, before these are stored."""
        assert self.gates is not None
        gate, memory = cast("AttentionGate", self.gates.layers[str(self.index)]), self.gate_memory
        in_decode = self.policy.runs_gates_in_decode(self.gates)
        valid = None if batch.step or not batch.padded else batch.token_indices >= 0
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            if memory or in_decode or not batch.ends_prompt:
                logits = gate.step(hidden, batch.token_indices, valid, memory)
            else:
                logits = gate(hidden, valid, False)
        if batch.is_prefill:
            memory.settle()
        if not in_decode and batch.ends_prompt:
            memory.reset()
        batch.notes.gate_logits[self.index] = logits

    def forward(
        self, call: AttentionCall, batch: ForwardBatch, layer_stores: Sequence[KVStore], evictor: Evictor | None
    ) -> Tensor:
        """Store the new tokens, attend and evict; return the attention output ``[B, H, T, Dv]``.

        Args:
            call: the layer's queries, and the keys and values of the new tokens.
            batch: the pass.
            layer_stores: the rows of each layer.
            evictor: decides which tokens are evicted. None: this pass evicts nothing from this layer.
        """
        store = layer_stores[self.index]
        self.window, self.can_expire = call.window, call.window is not None or self.visible_unflagged is not None
        self.chunk = call.chunk
        depends_on_cached = store.rotation is not None and store.rotation.depends_on_cached
        if (depends_on_cached or self.chunk is not None) and not batch.is_first_pass:
            # tokens that no new token sees are freed first
            first = batch.num_tokens - batch.counts
            if depends_on_cached or self.chunk is None or bool((first % self.chunk == 0).any()):  # a chunk begins
                self._free_expired(batch, store, first, batch.counts if batch.step else None)
        out, weights, placed = self.append_and_attend(call, batch, store, evictor)
        if self.num_kv_readers and not batch.is_first_pass:
            # Later layers read these keys too: the last of them evicts. In a first pass their calls hold the keys.
            own = PendingEviction(self.num_kv_readers, placed, weights, evictor)
            pending = batch.notes.kv_readers.get(self.index, own)
            batch.notes.kv_readers[self.index] = pending._replace(readers_left=pending.readers_left - 1)
            if pending.readers_left:
                return out.to(call.q.dtype)
            _, placed, weights, evictor = pending
        elif call.shared:
            return out.to(call.q.dtype)
        if evictor is not None:
            with self.watch.running(out.device):
                needs = evictor.needs[batch.is_prefill]
                queries = placed.q.to(store.pool.dtype), batch.token_indices, batch.token_indices >= 0
                last = self.policy.lookback if batch.is_prefill else needs.lookback
                if last:
                    queries = self._add_past_queries(queries, batch, store, last)
                if batch.evicting is not None or needs.every_query:
                    self._score_and_evict(placed, batch, layer_stores, evictor, queries, weights)
        # later layers may still evict from this one, by masks over these slots: the slots must not move
        decided_later = evictor is not None and self.index in evictor.budgets.pending
        if self.can_expire and not batch.step and not decided_later:  # else ForwardPass.end_pass does it
            self.free_expired_if_many(batch, store)
        return out.to(call.q.dtype)

    # ---- append and attend

    def append_and_attend(
        self, call: AttentionCall, batch: ForwardBatch, store: KVStore, evictor: Evictor | None = None
    ) -> tuple[Tensor, Tensor | None, AttentionCall]:
        """Store the new tokens, unless an earlier layer made them, and attend; nothing is evicted.

        Returns:
            The output ``[B, H, T, Dv]``; of a single query its weights ``[B, H, S]`` by slot where the scorer needs
            them, else None; and the call with its tokens at their places among the held ones.
        """
        placed = call if store.rotation is None else store.rotation.rotate_call(call, batch, store)
        if not (batch.step or call.shared):  # a step made room in all layers at once
            store.make_room(slice(self.index, self.index + 1), batch.counts)
        pages = store.pages(self.index)
        num_recent = self.visible_unflagged
        if num_recent is not None and self._dense(batch):
            num_recent = None  # all tokens are seen
        if call.shared:
            gate = batch.notes.gate_outputs.get(self.index)
        else:
            gate = None if self.gates is None else self._gate_output(batch)
            k, v = (x.to(store.pool.dtype) for x in (placed.k, placed.v))  # autocast
            kv_append(pages, k, v, batch.token_indices, gate)
            if self.num_kv_readers:
                batch.notes.gate_outputs[self.index] = gate
        if call.mask is not None and num_recent is not None:
            raise UserError("Tokens of an image see later ones: expected gates that read a prompt densely.")
        if batch.is_first_pass and num_recent is None:  # left-aligned: padding comes last, where no token sees it
            return call.dense(None, left_padded=False), None, call
        if batch.is_first_pass and num_recent and gate is not None:
            valid = batch.token_indices >= 0 if batch.padded else None
            arguments = placed.q, placed.k, placed.v, gate, valid, call.scaling, num_recent
            return gated_prefill(*arguments, window=call.window, softmax=call.softmax), None, placed
        sees_all_held = batch.step and call.window is None and num_recent is None
        needs = None if evictor is None or not batch.step or call.shared else evictor.needs[batch.is_prefill]
        weigh = needs is not None and needs.step_weights and (batch.evicting is not None or bool(needs.every_query))
        query_indices = None if sees_all_held else batch.token_indices
        options = call.scaling, call.window, num_recent, call.softmax, weigh
        out, weights = paged_attention(placed.q.to(store.pool.dtype), pages, query_indices, *options)
        return out, weights, placed

    def _dense(self, batch: ForwardBatch) -> bool:
        """Return whether the queries of a pass see tokens without a flag too."""
        return batch.is_prefill and self.gates is not None and self.gates.config.prefill == "dense"

    def _gate_output(self, batch: ForwardBatch) -> Tensor | None:
        """Return the gate output to store with the new tokens, ``[B, Hkv, T]``; None means that no gate ran."""
        logits = batch.notes.gate_logits.pop(self.index, None)
        if logits is None:
            return None
        assert self.gates is not None
        if self.visible_unflagged is None:
            return self.gates.stored(logits)
        tokens, sinks = batch.token_indices.amax(1) + 1, self.gates.config.sink_tokens
        return self.gates.flags(logits) | retention.protected_mask(
            batch.token_indices[:, None], tokens, sinks, 0, batch.prompts.protected_on_device
        )

    # ---- observe and evict

    def _add_past_queries(self, new: Queries, batch: ForwardBatch, store: KVStore, last: int) -> Queries:
        """Return the remembered queries followed by the new ones, and remember the ``last`` newest of them."""
        rotation, location = store.rotation, (batch, store, self.index)
        q, token_indices, valid = new
        q = q if rotation is None else rotation.to_token_index(q, *location)
        queries = self.observation_window.followed_by((q, token_indices, valid))
        self.observation_window.remember(queries, last)
        q, token_indices, valid = queries
        return q if rotation is None else rotation.to_cache_position(q, *location), token_indices, valid

    def evict_by_records(
        self,
        call: AttentionCall,
        batch: ForwardBatch,
        layer_stores: Sequence[KVStore],
        evictor: Evictor,
    ) -> None:
        """Evict from a prompt that an earlier pass read, whose records are stored.

        Args:
            call: how the layer attends, without new tokens.
            batch: the pass.
            layer_stores: the rows of each layer.
            evictor: decides which tokens are evicted.
        """
        queries = self.observation_window.queries
        assert queries is not None
        with self.watch.running(call.q.device):
            self._score_and_evict(call, batch, layer_stores, evictor, queries)
        self.observation_window.reset()

    def _score_and_evict(
        self,
        call: AttentionCall,
        batch: ForwardBatch,
        layer_stores: Sequence[KVStore],
        evictor: Evictor,
        queries: Queries,
        weights: Tensor | None = None,
    ) -> None:
        """Let the scorer note the pass, and evict from the sequences ``batch.evicting``, if there are some."""
        store, device = layer_stores[self.index], call.q.device.type
        reader = self._reader(call, batch, store, queries, weights)
        slots = reader.cached.shape[2]
        # without the free slots at the end of the table
        records = {name: x[..., :slots] for name, x in store.records[self.index].items()}
        # scores are float32 under autocast too; to enter its context costs more than to ask for it
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            if batch.evicting is not None:
                return evictor.evict(reader, batch, layer_stores, records)
            needs = evictor.needs[batch.is_prefill]
            evictor.scorer.note(reader.inputs(needs, records, only_noted=True), records)
            store.put_records(self.index, records)

    def _reader(
        self, call: AttentionCall, batch: ForwardBatch, store: KVStore, queries: Queries, weights: Tensor | None
    ) -> LayerReader:
        """Return the reader of the layer for this pass; it computes nothing before something is read."""
        newest = batch.token_indices[:, -1]
        lengths = newest + 1 if batch.step else batch.num_tokens.to(newest.device, non_blocking=True)
        row_lengths = store.lengths_cpu[self.index]
        cached = CachedKV(
            store=store,
            layer=self.index,
            batch=batch,
            new_keys=call.k,
            new_values=call.v,
            shape=(*row_lengths.shape, store.slots if batch.step else int(row_lengths.max())),
            lengths=lengths,
            sliding_window=call.window,
            prefill_chunk=self.policy.block,
            same_for_all_heads=batch.is_first_pass or self.policy.same_for_all_heads,
        )
        rotated_queries, query_indices, query_valid = queries
        return LayerReader(
            cached=cached,
            rotated_queries=rotated_queries,
            query_indices=query_indices,
            query_valid=query_valid,
            num_new=call.q.shape[2],
            lengths=lengths,
            max_length=batch.max_length,
            prompt_lengths=batch.prompts.lengths_on_device,
            scaling=call.scaling,
            step_weights=weights,
            softmax=call.softmax,
            layer=self.index,
            sliding_window=call.window,
            log_retention=self.gates is not None and self.gates.decays,
            caller_protected=batch.prompts.protected_on_device,
            prompt_sums=self.observation_window.sums,
            decoding=not batch.is_prefill,
            rotate=partial(rotate, self.decoder, layer=self.index),
            load_output_projection=partial(output_weight, call.module, call.q.shape[1]),
            memo=call.memo,
        )

    # ---- tokens that no later query sees

    def free_expired_if_many(self, batch: ForwardBatch, store: KVStore) -> None:
        """Free tokens that left the sliding window, or are neither flagged nor recent, once they are many."""
        visible = (self.window or 0) - 1 if self.visible_unflagged is None else self.max_length_after_freeing
        if batch.ends_prompt or int(store.lengths_cpu[self.index].max()) >= visible + MAX_EXPIRED:
            with suppress(PoolFullError):  # no room for copies of shared blocks: expired tokens stay for now
                self._free_expired(batch, store, batch.num_committed)

    @property
    def frees_expired(self) -> bool:
        """Whether expired tokens are freed, so that a row's newest tokens need not lie last."""
        return self.can_expire or self.chunk is not None

    def crop(self, store: KVStore, tokens: Tensor, left: Tensor) -> None:
        """Drop the ``tokens`` ``[B]`` newest tokens of each sequence; ``left`` ``[B]`` tokens stay."""
        if not self.frees_expired:
            return store.truncate(tokens, slice(self.index, self.index + 1))
        token_indices = store.token_indices(self.index)
        keep = (token_indices >= 0) & (token_indices < left.to(token_indices.device)[:, None, None])
        kept = keep.sum(-1)
        if torch.equal(keep, torch.arange(keep.shape[-1], device=keep.device) < kept[..., None]):  # they lie last
            store.shorten(slice(self.index, self.index + 1), kept.cpu()[None])
        else:
            store.keep({self.index: keep})

    def _free_expired(self, batch: ForwardBatch, store: KVStore, query: Tensor, uncached: Tensor | None = None) -> None:
        """Free the tokens that no query of a token index from ``query`` ``[B]`` on sees.

        ``store`` counts ``uncached`` ``[B]`` tokens already, which are not stored yet. None: it counts none.
        """
        dense = self._dense(batch) and not batch.ends_prompt  # later parts of the prompt see all tokens
        # Scorers read attention of earlier queries, whose windows begin earlier. Under chunked attention they cannot.
        if batch.is_prefill and not batch.ends_prompt and self.chunk is None:
            query = (query - self.policy.lookback).clamp_min(0)
        if self.window is None and self.chunk is None and (self.visible_unflagged is None or dense):
            return
        index, token_indices = store.ledger(self.index)
        keep = self.visible(store, index, token_indices, query, flags=not dense)
        kept = keep.sum(-1).cpu()
        lengths = store.lengths_cpu[self.index] - (0 if uncached is None else uncached[:, None])
        if bool((kept < lengths).any()):
            spare = 1 if batch.step else 0  # the block of a step's token is kept
            store.compact({self.index: keep}, kept[None], spare)
            if uncached is not None:  # they go into other blocks now, which rows may share
                store.make_room(slice(self.index, self.index + 1), uncached)
            batch.notes.expired = True
        self.max_length_after_freeing = int(kept.max())

    def visible(
        self, store: KVStore, index: Tensor, token_indices: Tensor, query: Tensor, flags: bool = True
    ) -> Tensor:
        """Return which slots a query from token index ``query`` ``[B]`` on may see, bool like ``token_indices``.

        Args:
            store: the rows.
            index: places of the slots in the pool, ``[B, Hkv, N]``.
            token_indices: of their tokens, -1 on free slots.
            query: on the host.
            flags: whether flags act: the query sees flagged and recent tokens alone.
        """
        keep, first = token_indices >= 0, query.to(token_indices.device)[:, None, None]
        if self.window is not None:
            keep &= token_indices > first - self.window
        if self.chunk is not None:
            keep &= token_indices >= first // self.chunk * self.chunk
        if self.visible_unflagged is not None and flags:
            keep &= (token_indices > first - self.visible_unflagged) | (store.gate_outputs(self.index, index) > 0)
        return keep

    # ---- sequences

    def fork(self) -> Layer:
        """Return a copy for another continuation of the text."""
        new = copy.copy(self)
        for name in ("observation_window", "gate_memory", "watch"):
            setattr(new, name, copy.deepcopy(getattr(self, name)))
        return new

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        self.observation_window.select(indices)
        self.gate_memory.select(indices)
