"""Evict: scores and budgets decide which tokens each layer keeps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import Tensor

from ag import retention
from ag.engine.allocators.base import Candidates, LayerBudgets
from ag.engine.allocators.uniform import Uniform
from ag.engine.forward_batch import ForwardBatch
from ag.engine.layer_reader import LayerReader, order_slots
from ag.engine.policy import Policy
from ag.engine.records import equally_many_rows
from ag.engine.scorers.base import Scorer
from ag.errors import BudgetWarning, UserError

if TYPE_CHECKING:
    from ag.engine.kv_store import KVStore
    from ag.engine.records import Records

CHECK_INTERVAL = 16  # evicting steps between two checks that scores were finite, as a check waits for the device
UNREAD_PARTS = 64  # most timed parts on a card whose events are not read yet


class NonFiniteScoreError(UserError, FloatingPointError):
    """A scorer gave NaN or infinity for a token that competes."""


class KeepCounts(NamedTuple):
    """How many tokens n layers keep of each sequence, computed on the host."""

    kept: Tensor  # [n, B, Hkv] long on the host
    keep_count: Tensor  # [n B Hkv] int32 for the kernel; in a counted step [L B Hkv], of all layers
    sinks_recent: Tensor  # [2, B] long: protected first and newest tokens
    evicting: Tensor  # [B] bool, sequences to evict from

    def to(self, device: torch.device) -> KeepCounts:
        """Return these counts with all but ``kept`` on a device."""
        return KeepCounts(self.kept, *(x.to(device, non_blocking=True) for x in self[1:]))


class Evictor:
    """Decides which tokens each layer of a cache keeps, and evicts all others.

    Usually the host knows how many tokens each row keeps: a kernel then finds the best of each row, without a wait for
    the device. A decoding step does so once for all layers. If heads or layers compete, PyTorch compares their scores,
    and the host waits for the numbers of kept tokens.

    Args:
        policy: with a scorer and a budget.
        layers: indices of the layers that share the budget, ascending.
        kv_heads: KV heads of each layer of the model.
    """

    def __init__(self, policy: Policy, layers: list[int], kv_heads: Sequence[int]) -> None:
        assert policy.scorer is not None
        self.policy, self.scorer, self.budgets = policy, policy.scorer, LayerBudgets(layers, kv_heads)
        #: The declared needs of the scorer: True for passes of the prompt, False for later ones.
        self.needs = {True: self.scorer.needs, False: self.scorer.decode_needs}
        cls = type(self.scorer)
        one_score = cls.second is Scorer.second
        self._host_counts_prompt = one_score and isinstance(policy.allocator, Uniform)
        self._host_counts_decode = one_score and not policy.allocator.compares_heads
        #: Whether the host counted what this step keeps; then each step runs one fixed list of operations.
        self.step_is_counted = False
        #: By store, the counts of a counted step; all steps use one piece of device memory.
        self._step: dict[KVStore, KeepCounts] = {}
        self._kept: dict[KVStore, Tensor] = {}  # [L, B, Hkv] long on the host, tokens of all layers after the step
        self._scores: dict[KVStore, Tensor] = {}  # [L, B, Hkv, S] float32, scores of all layers
        self._layers_left: dict[KVStore, int] = {}  # layers whose scores are still to come in this step
        self._nonfinite: dict[KVStore, Tensor] = {}  # [L, B, Hkv] int32, 1 for rows with a score that was not finite
        self._steps_unchecked = 0  # evicting steps since they were read

    def fork(self) -> Evictor:
        """Return a copy for another continuation of the text."""
        new = copy(self)
        new.budgets, new._step, new._kept, new._nonfinite = deepcopy(self.budgets), {}, {}, {}
        new._scores, new._layers_left = {}, {}
        return new

    # ---- a pass

    def begin_step(self, batch: ForwardBatch, stores: Sequence[KVStore], sliding_window: int | None) -> None:
        """Count the tokens that a decoding step keeps in all layers, and copy the counts to the kernel's memory.

        Args:
            batch: the step.
            stores: one for each kind of KV heads; their ``lengths_cpu`` count the new tokens already.
            sliding_window: the sliding window of the layers that share the budget. None: they have none.
        """
        for store in stores if self._host_counts_decode and self.policy.steps is not None else ():
            if not store.stacked:
                store.stack_records()
            shape, device = (*store.lengths_cpu.shape, store.slots), store.block_table.device
            if store not in self._scores or self._scores[store].shape != shape:
                self._scores[store] = torch.zeros(shape, dtype=torch.float32, device=device)
            if store not in self._nonfinite or self._nonfinite[store].shape != shape[:-1]:
                self._nonfinite[store] = torch.zeros(shape[:-1], dtype=torch.int32, device=device)
        self.step_is_counted = batch.evicting is not None and self._host_counts_decode and stores[0].rotation is None
        if not self.step_is_counted:
            return
        layers = self.budgets.layers
        for store in stores:
            counts, old = self._count(batch, store, layers, sliding_window), self._step.get(store)
            self._kept[store] = kept = store.lengths_cpu.clone()
            kept[layers] = counts.kept
            store.unshare_for_eviction(slice(None), kept)
            self._layers_left[store] = int(store.layer_mask[layers].sum())
            counts = counts._replace(keep_count=kept.flatten().int())
            if old is None or old.keep_count.shape != counts.keep_count.shape:
                self._step[store] = counts.to(store.block_table.device)
                continue
            for on_device, on_host in zip(old[1:], counts[1:], strict=True):
                on_device.copy_(on_host, non_blocking=True)  # pageable memory is staged before this returns: no wait

    def evict(
        self, reader: LayerReader, batch: ForwardBatch, layer_stores: Sequence[KVStore], records: Records
    ) -> None:
        """Let the scorer record the pass, and evict the tokens that exceed the budget.

        If layers compete, earlier layers lose tokens too. In a counted step each layer keeps its score, and the last
        layer evicts from all of them, without a wait for the device.

        Args:
            reader: gives the scorer's inputs of the layer.
            batch: the pass.
            layer_stores: the rows of each layer.
            records: the scorer's records of the layer's slots; the scorer may add more.
        """
        assert batch.evicting is not None
        store = layer_stores[reader.layer]
        if not (batch.step and self.step_is_counted):
            if self._host_counts_prompt if batch.is_prefill else self._host_counts_decode:
                self._evict_counted(reader, batch, store, records)
            else:
                self._evict_by_masks(reader, batch, layer_stores, records)
            return
        counts, scores = self._step[store], self._scores[store]
        scores[reader.layer] = self._note_and_score(reader, batch, records, counts.evicting)
        store.put_records(reader.layer, records)
        self._layers_left[store] -= 1
        if not self._layers_left[store]:
            token_index = store.pages().token_indices[store.block_table].flatten(-2)  # any number on free slots
            score = _by_rule(scores, token_index, reader, counts)
            store.compact_all_layers(score, counts.keep_count, self._nonfinite[store])

    def _evict_by_masks(
        self, reader: LayerReader, batch: ForwardBatch, layer_stores: Sequence[KVStore], records: Records
    ) -> None:
        """Evict what PyTorch decides, from this layer and from earlier ones."""
        assert batch.evicting is not None
        layer = reader.layer
        evicting = None if bool(batch.evicting.all()) else batch.evicting.to(reader.lengths.device)
        keep_masks = self.decide(reader, evicting, records)
        layer_stores[layer].put_records(layer, records)
        for store in dict.fromkeys(layer_stores[index] for index in keep_masks):
            by_slot = {}
            for index, keep in keep_masks.items():
                if layer_stores[index] is store:
                    order = reader.slot_order if index == layer else order_slots(store.token_indices(index))
                    by_slot[index] = keep if order is None else torch.empty_like(keep).scatter_(-1, order, keep)
            store.keep(by_slot)

    def _evict_counted(self, reader: LayerReader, batch: ForwardBatch, store: KVStore, records: Records) -> None:
        """Evict from one layer the numbers of tokens that the host counts."""
        layer = reader.layer
        counts = self._count(batch, store, [layer], reader.sliding_window).to(reader.lengths.device)
        score = self._note_and_score(reader, batch, records, counts.evicting)
        store.put_records(layer, records)
        if not bool((counts.kept[0] < store.lengths_cpu[layer]).any()):
            return
        nonfinite = self._nonfinite.get(store)
        if nonfinite is None or nonfinite.shape != store.lengths.shape:
            nonfinite = self._nonfinite[store] = torch.zeros_like(store.lengths)
        score = _by_rule(score.float(), reader.distinct_indices, reader, counts)
        store.compact({layer: score}, counts.kept, nonfinite=nonfinite[layer])

    def _note_and_score(self, reader: LayerReader, batch: ForwardBatch, records: Records, evicting: Tensor) -> Tensor:
        """Let the scorer note the pass, and return its score ``[B, Hkv, N]``.

        The sequences of a batch reach their budgets at different steps. A scorer whose steps no CUDA graph records sees
        only those that are evicted from, unless it notes every query or has sums of all prompts; the others score 0.
        """
        assert batch.evicting is not None
        needs, shown, shown_records, sequences = self.needs[not reader.decoding], reader, records, None
        sees_all = needs.steady or needs.every_query or reader.prompt_sums or bool(batch.evicting.all())
        if batch.step and reader.decoding and not sees_all:
            sequences = batch.evicting.nonzero()[:, 0].to(reader.lengths.device)
            shown, evicting = reader.of_sequences(sequences), evicting[sequences]
            shown_records = {name: record[sequences] for name, record in records.items()}
        inputs = shown.inputs(needs, shown_records, evicting)
        self.scorer.note(inputs, shown_records)
        score = self.scorer.score(inputs)
        if not (isinstance(score, Tensor) and score.is_floating_point() and score.shape == shown.cached.shape):
            self._refuse_score(score, shown)
        if sequences is None:
            return score
        for name, record in shown_records.items():
            all_rows = records[name] if name in records else record.new_zeros(len(reader.lengths), *record.shape[1:])
            all_rows, record = equally_many_rows(all_rows, record)
            records[name] = all_rows.index_copy(0, sequences, record)
        return score.new_zeros(reader.cached.shape).index_copy(0, sequences, score)

    def end_pass(self, batch: ForwardBatch) -> None:
        """Count the tokens after a step, and check that scores were finite.

        Raises:
            NonFiniteScoreError: the score of a token that competes was not finite; the message names layer and scorer.
                While decoding the host checks after every 16 evictions, as a check waits for the device.
        """
        if batch.step and self.step_is_counted:
            for store, kept in self._kept.items():
                lengths, layers = store.lengths_cpu.clone(), self.budgets.layers
                lengths[layers] = kept[layers]  # other layers may have freed expired tokens
                store.shrink_to(slice(None), lengths)
        if batch.evicting is None:
            return
        self._steps_unchecked += 1
        if not batch.step or self._steps_unchecked >= CHECK_INTERVAL:
            self.raise_if_nonfinite()

    def raise_if_nonfinite(self) -> None:
        """Check that all scores so far were finite; raises as :meth:`end_pass` says, until the cache is reset."""
        self._steps_unchecked = 0
        for nonfinite in self._nonfinite.values():
            layers = nonfinite.flatten(1).any(1).tolist()
            if any(layers):
                self._refuse_nonfinite(layers.index(True))

    def _refuse_nonfinite(self, layer: int) -> NoReturn:
        raise NonFiniteScoreError(
            f"{type(self.scorer).__name__}.score of {self.policy!r} gave NaN or infinity in layer {layer}: "
            "expected finite numbers for all tokens that compete; look at the scorer and at the weights."
        )

    def _refuse_score(self, score: object, reader: LayerReader) -> NoReturn:
        gave = f"{score.dtype} {list(score.shape)}" if isinstance(score, Tensor) else type(score).__name__
        raise UserError(
            f"{type(self.scorer).__name__}.score of {self.policy!r} gave {gave} in layer {reader.layer}: "
            f"expected torch.float32 [B, Hkv, N], here {list(reader.cached.shape)}."
        )

    def _warn_over_budget(self, over: Tensor, num_protected: Tensor) -> None:
        """Note and warn that sequences ``over`` ``[B]`` bool protect more tokens per KV head than their budget."""
        noted = self.budgets.over_budget
        noted = torch.zeros(len(over), dtype=torch.bool) if noted is None else noted
        if not noted.any():
            warnings.warn(  # the text is equal for all prompts, so Python shows it once
                f"{self.policy!r} protects {int(num_protected[int(over.long().argmax())])} tokens per KV head (sinks, "
                "recent, window, protect), more than its budget allows here, and keeps them all; give a larger budget "
                "or protect less.",
                BudgetWarning,
                stacklevel=2,
            )
        self.budgets.over_budget = noted | over

    # ---- decided by PyTorch

    def decide(
        self, reader: LayerReader, evicting: Tensor | None = None, records: Records | None = None
    ) -> dict[int, Tensor]:
        """Return keep masks ``[B, Hkv, N]`` of a layer, and of earlier layers that lose tokens to it.

        Tokens are in the order of their indices.

        Args:
            reader: gives the scorer's inputs of the layer.
            evicting: ``[B]`` bool, sequences to evict from. None: all.
            records: the scorer's records of the layer's slots; the scorer may add more. None: there are none yet.

        Raises:
            NonFiniteScoreError: the score of a token that competes is not finite.
        """
        allocator = self.policy.allocator
        if evicting is None:
            evicting = torch.ones_like(reader.lengths, dtype=torch.bool)
        candidates = self._candidates(reader, evicting, {} if records is None else records)
        budget, num_protected, evicting = candidates.capacity, candidates.num_protected, candidates.evicting
        not_finite = candidates.score.isnan()
        if candidates.second is not None:
            not_finite |= candidates.score.isfinite() & ~candidates.second.isfinite()
        nonfinite = evicting & not_finite.flatten(1).any(1)
        over = evicting & (num_protected > budget) & (candidates.lengths > budget)
        if bool((nonfinite | over).any()):  # the host waits once, for rare cases
            if bool(nonfinite.any()):
                self._refuse_nonfinite(reader.layer)
            self._warn_over_budget(over.cpu(), num_protected.cpu())
            candidates.capacity = retention.keep_count(budget, num_protected.where(over, 0))
        if reader.decoding:
            return {reader.layer: allocator.keep_in_decode(reader.layer, candidates, self.budgets)}
        return allocator.keep(reader.layer, candidates, self.budgets)

    def _candidates(self, reader: LayerReader, evicting: Tensor, records: Records) -> Candidates:
        """Let the scorer note and score, and return the layer's tokens as candidates."""
        scorer, allocator = self.scorer, self.policy.allocator
        if self.budgets.over_budget is None:
            self.budgets.over_budget = torch.zeros(len(reader.lengths), dtype=torch.bool)
        budget = self.policy.capacity(reader.prompt_lengths)
        inputs = reader.inputs(self.needs[not reader.decoding], records, evicting)
        scorer.note(inputs, records)
        preference = (
            None if reader.decoding else allocator.layer_preference(reader.inputs(allocator.needs, records, evicting))
        )
        score, indices, lengths = scorer.score(inputs), reader.distinct_indices, reader.lengths
        if not (isinstance(score, Tensor) and score.is_floating_point() and score.shape == reader.cached.shape):
            self._refuse_score(score, reader)
        protected = retention.protected_mask(indices, lengths, *scorer.limits(budget), reader.caller_protected)
        second, first_share = scorer.second(inputs, score) or (None, 1.0)
        expired = ~reader.occupied  # sequences that are not evicted from keep expired tokens for later looks back
        expired = expired if reader.expired is None else expired | (reader.expired & evicting[:, None, None])
        score = retention.eviction_score(score, protected, expired)
        if (order := reader.slot_order) is not None:
            score, second = score.gather(-1, order), None if second is None else second.gather(-1, order)
        return Candidates(
            *(score, budget, reader.prompt_lengths, evicting),
            preference=preference,
            second=second,
            first_share=first_share,
        )

    # ---- counted by the host

    def _count(self, batch: ForwardBatch, store: KVStore, layers: list[int], sliding_window: int | None) -> KeepCounts:
        """Return how many tokens layers keep; all tensors are on the host."""
        row_lengths, evicting, prompts = store.lengths_cpu[layers], batch.evicting, batch.prompts
        assert evicting is not None and prompts.capacity is not None and prompts.limits is not None
        budget = torch.stack([self.budgets.layer_budget.get(layer, prompts.capacity) for layer in layers])
        sinks, recent = (torch.as_tensor(x).expand_as(evicting) for x in prompts.limits)
        num_protected = retention.count_protected(batch.num_tokens, sinks, recent, prompts.protected, sliding_window)
        over = evicting & (num_protected > budget) & (row_lengths.amax(2) > budget)
        if bool(over.any()):
            self._warn_over_budget(over.any(0), num_protected)
        keep_count = retention.keep_count(budget, num_protected)
        if sliding_window is not None:
            keep_count = keep_count.clamp_max(sliding_window)
        kept = row_lengths.minimum(keep_count[..., None]).where(evicting[:, None], row_lengths)
        limits = torch.stack([sinks, recent])
        return KeepCounts(kept, kept.flatten().int(), limits, evicting.clone())


def _by_rule(score: Tensor, token_index: Tensor, reader: LayerReader, counts: KeepCounts) -> Tensor:
    """Return a score ``[..., B, Hkv, N]`` with +inf for protected tokens and -inf for expired ones."""
    lengths, window = reader.lengths, reader.sliding_window
    sinks, recent = counts.sinks_recent.unbind()
    protected = retention.protected_mask(token_index, lengths, sinks, recent, reader.caller_protected)
    expired = None if window is None else retention.expired_mask(token_index, lengths, window)
    return retention.eviction_score(score, protected, expired)


class Stopwatch:
    """Adds up the seconds that scores and decisions take.

    On a card they are the time between two events in its stream. The host reads them with the sum, or after 64 more.

    Args:
        seconds: that the sum begins with.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._sum = seconds
        self._unread: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Count the time of what runs within, on a device."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._sum += time.perf_counter() - start
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():  # a graph measures nothing
            yield
            return
        stream = torch.cuda.current_stream(device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        yield
        last.record(stream)
        self._unread.append((first, last))
        if len(self._unread) > UNREAD_PARTS:
            self._read(1)

    @property
    def seconds(self) -> float:
        """Total seconds; on a card the host waits for unfinished parts."""
        self._read(len(self._unread))
        return self._sum

    def _read(self, count: int) -> None:
        """Add the oldest parts, for whose ends the host waits."""
        for first, last in self._unread[:count]:
            last.synchronize()
            self._sum += first.elapsed_time(last) / 1000
        del self._unread[:count]

    def __deepcopy__(self, memo: object) -> Stopwatch:
        """Copy the sum: events belong to one watch."""
        return Stopwatch(self.seconds)
