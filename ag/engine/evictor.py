"""Turn scores into what stays of each layer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ag.engine.allocators.base import Candidates, LayerBudgets
from ag.engine.allocators.uniform import Uniform
from ag.engine.attention_stats import AttentionStats
from ag.engine.forward_batch import ForwardBatch
from ag.engine.policy import Policy
from ag.engine.scorers.base import Scorer
from ag.engine.shown import in_order
from ag.errors import BudgetWarning, UserError
from ag.kernels.kv_compact import Worst

if TYPE_CHECKING:
    from ag.engine.kv_store import KVStore
    from ag.engine.records import Records

LOOK = 16  # evicting steps after which the host looks whether scores were finite


class NonFiniteScoreError(UserError, FloatingPointError):
    """A scorer gave NaN or infinity where a token competes."""


class Limits(NamedTuple):
    """What n layers keep of each sequence, counted on the host."""

    kept: Tensor  # [n, B, Hkv] long on the host, tokens that stay
    stays: Tensor  # [n, B Hkv] int32, the same for the kernel
    numbers: Tensor  # [n, 4, B] long: capacity, sinks, the first recent rank, the last expired one
    due: Tensor  # [B] bool, sequences to evict from

    def on(self, device: torch.device) -> Limits:
        """Return the same with the parts for kernels on a device."""
        return Limits(self.kept, *(x.to(device) for x in self[1:]))


class Evictor:
    """Decides for the layers of a cache what goes, and drops it.

    Where every head keeps a number of tokens that the host knows, a kernel finds the worst ones of each row
    (:class:`ag.kernels.kv_compact.Worst`), without a wait for the device. Where heads or layers compete, PyTorch
    compares their scores, and the host waits once for the numbers of tokens that stayed.

    Args:
        policy: with a scorer and a budget.
        layers: indices of the layers that share the budget, ascending.
        kv_heads: KV heads of each layer of the model.
    """

    def __init__(self, policy: Policy, layers: list[int], kv_heads: Sequence[int]) -> None:
        assert policy.scorer is not None
        self.policy, self.scorer, self.budgets = policy, policy.scorer, LayerBudgets(layers, kv_heads)
        kind = type(self.scorer)
        plain = kind.second is Scorer.second and kind.protected is Scorer.protected  # limits say what is protected
        self._counts_prompt = plain and isinstance(policy.allocator, Uniform)
        self._counts_later = plain and not policy.allocator.compares_heads
        #: Whether the host counted what the step at hand keeps, so that it is the same operations at each step.
        self.counted = False
        self._step: dict[KVStore, Limits] = {}  # of such a step, on the device in the same memory at each
        self._kept: dict[KVStore, Tensor] = {}  # [L, B, Hkv] long on the host, tokens of all layers after such a step
        self._settled: tuple[Any, dict[int, Tensor]] = None, {}  # the layers' budgets, and the same on the host
        self._found: Tensor | None = None  # [n] int32 on the device, layers in which a score was not finite
        self._steps = 0  # evicting steps since the host looked there

    def fork(self) -> Evictor:
        """Return a copy for another continuation of the same text."""
        new = copy(self)
        new.budgets, new._step, new._kept, new._found = deepcopy(self.budgets), {}, {}, None
        return new

    # ---- a pass

    def begin_step(self, batch: ForwardBatch, stores: Sequence[KVStore], window: int | None) -> None:
        """Count what a step keeps of all layers, and put it where the kernel reads it.

        ``held`` of the stores counts the new tokens; ``window`` is that of the layers that share the budget.
        """
        self.counted = batch.evict is not None and self._counts_later and stores[0].rotation is None
        if not self.counted:
            return
        layers = self.budgets.layers
        for store in stores:
            limits, old = self._limits(batch, store, layers, window), self._step.get(store)
            self._kept[store] = kept = store.held.clone()
            kept[layers] = limits.kept
            store.make_own(slice(None), kept)
            if old is None or old.kept.shape != limits.kept.shape:
                self._step[store] = limits.on(store.table.device)
                continue
            for there, here in zip(old[1:], limits[1:], strict=True):
                there.copy_(here, non_blocking=True)  # the host does not wait, as its memory is not pinned

    def evict(self, seen: AttentionStats, batch: ForwardBatch, stores: Sequence[KVStore], records: Records) -> None:
        """Let the scorer note the pass, and drop what exceeds the budget, from earlier layers too where layers compete.

        ``stores`` hold the rows of each layer; ``records`` are those of the slots that the scorer sees, to which it may
        add.
        """
        assert batch.evict is not None
        store = stores[seen.layer]
        layer, place, counted = seen.layer, self.budgets.layers.index(seen.layer), batch.step and self.counted
        if not counted and not (self._counts_prompt if batch.is_prefill else self._counts_later):
            due = None if bool(batch.evict.all()) else batch.evict.to(seen.q.device)
            masks = self.decide(seen, due, records)
            store.put_records(layer, records)
            for index, keep in masks.items():
                kept, rows = keep.sum(-1).cpu(), stores[index]
                if bool((kept < rows.held[index]).any()):
                    order = seen.keys.order if index == layer else in_order(rows.ranks(index))
                    by_slot = keep if order is None else torch.empty_like(keep).scatter_(-1, order, keep)
                    rows.compact(index, by_slot, kept)
            return
        if self._found is None:
            self._found = torch.zeros(len(self.budgets.layers), dtype=torch.int32, device=seen.q.device)
        found = self._found[place : place + 1]
        if counted:
            limits = self._step[store]
        else:
            limits, place = self._limits(batch, store, [layer], seen.sliding_window).on(seen.q.device), 0
        seen.capacity, sinks, recent_from, expired_to = limits.numbers[place].unbind()
        seen.due = limits.due
        self.scorer.note(seen, records)
        store.put_records(layer, records)
        score = self.scorer.score(seen)
        if getattr(score, "shape", None) != seen.keys.shape:
            self._refuse_shape("score", score, seen)
        worst = Worst(
            stays=limits.stays[place],
            score=score.float(),
            sinks=sinks,
            recent_from=recent_from,
            expired_to=expired_to,
            found=found,
            protected=batch.prompts.protected_there,
        )
        if counted:
            store.drop(layer, worst)
        elif bool((limits.kept[0] < store.held[layer]).any()):
            store.compact(layer, worst, limits.kept[0])

    def end_pass(self, batch: ForwardBatch) -> None:
        """Count what a step dropped, and look whether scores were finite.

        Raises:
            NonFiniteScoreError: when the score of a token that competes was not finite, naming layer and scorer. Behind
                a step the host looks every 16 evictions, as it waits for the device.
        """
        if batch.step and self.counted:
            for store, kept in self._kept.items():
                held, counted = store.held.clone(), self.budgets.layers
                held[counted] = kept[counted]  # other layers may have removed what no query sees
                store.set_held(slice(None), held)
        if batch.evict is None:
            return
        self._steps += 1
        if not batch.step or self._steps >= LOOK:
            self.look()

    def look(self) -> None:
        """Look whether scores were finite since the last look; raises as :meth:`end_pass` says."""
        self._steps = 0
        found = [] if self._found is None else self._found.tolist()
        if any(found):
            assert self._found is not None
            self._found.zero_()
            self._refuse_scores(self.budgets.layers[found.index(1)])

    def _refuse_scores(self, layer: int) -> NoReturn:
        raise NonFiniteScoreError(
            f"{type(self.scorer).__name__}.score of {self.policy!r} gave NaN or infinity in layer {layer}: "
            "expected finite numbers for all tokens that compete; look at the scorer and at the weights."
        )

    def _refuse_shape(self, what: str, found: object, seen: AttentionStats) -> NoReturn:
        gave = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise UserError(
            f"{type(self.scorer).__name__}.{what} of {self.policy!r} gave {gave} in layer {seen.layer}: "
            f"expected a tensor [B, Hkv, N], here {list(seen.keys.shape)}."
        )

    def _note_over(self, over: Tensor, fixed: Tensor) -> None:
        """Note and warn of sequences ``[B]`` that protect ``fixed`` ``[B]`` tokens per KV head, over the budget."""
        known = self.budgets.over_budget
        known = torch.zeros(len(over), dtype=torch.bool) if known is None else known
        if not known.any():
            warnings.warn(  # the same text for every prompt, so that Python shows it once
                f"{self.policy!r} protects {int(fixed[int(over.long().argmax())])} tokens per KV head (sinks, recent, "
                "window, protect), more than its budget allows here, and keeps them all; give a larger budget or "
                "protect less.",
                BudgetWarning,
                stacklevel=2,
            )
        self.budgets.over_budget = known | over

    # ---- decided by PyTorch

    def decide(
        self, seen: AttentionStats, due: Tensor | None = None, records: Records | None = None
    ) -> dict[int, Tensor]:
        """Return what stays of a layer, and of earlier ones that give way: masks ``[B, Hkv, N]``, by rank ascending.

        Args:
            seen: the layer.
            due: ``[B]`` bool, sequences to evict from; None means all.
            records: where the scorer first notes what it sees; None means that it notes nothing.

        Raises:
            NonFiniteScoreError: when the score of a token that competes is not finite.
        """
        allocator, everyone = self.policy.allocator, torch.ones(len(seen.q), dtype=torch.bool, device=seen.q.device)
        candidates = self._candidates(seen, everyone if due is None else due, records)
        finite = candidates.finite
        if bool((candidates.over | ~finite).any()):  # the host waits once for what is rare
            if not bool((finite | ~candidates.due).all()):
                self._refuse_scores(seen.layer)
            if bool((tight := candidates.tight).any()):
                self._note_over(tight.cpu(), candidates.fixed.cpu())
                candidates.capacity = candidates.fixed.where(tight, candidates.capacity)
        if seen.decoding:
            return {seen.layer: allocator.keep_later(seen.layer, candidates, self.budgets)}
        return allocator.keep(seen.layer, candidates, self.budgets)

    def _candidates(self, seen: AttentionStats, due: Tensor, records: Records | None) -> Candidates:
        scorer, keys = self.scorer, seen.keys
        if self.budgets.over_budget is None:
            self.budgets.over_budget = torch.zeros(len(seen.q), dtype=torch.bool)
        capacity = self.policy.capacity(seen.prompt_lengths)
        seen.due, seen.capacity = due, capacity
        if records is not None:
            scorer.note(seen, records)
        preference = None if seen.decoding else self.policy.allocator.wish(seen)
        score, protected, valid = scorer.score(seen), scorer.protected(seen, capacity), seen.key_valid
        if seen.sliding_window is not None:  # what other sequences hold for queries that are looked back at later
            valid = valid | (keys.valid & ~due[:, None, None])
        for what, found in (("score", score), ("protected", protected)):
            if getattr(found, "shape", None) != seen.keys.shape:
                self._refuse_shape(what, found, seen)
        protected = protected if seen.stays is None else protected | seen.stays
        second, first_share = scorer.second(seen, score) or (None, 1.0)
        if (order := keys.order) is not None:
            score, protected, valid = (x.gather(-1, order) for x in (score, protected, valid))
            second = None if second is None else second.gather(-1, order)
        return Candidates(
            *(score, protected, valid, capacity, seen.prompt_lengths, due),
            preference=preference,
            second=second,
            first_share=first_share,
        )

    # ---- counted by the host

    def _limits(self, batch: ForwardBatch, store: KVStore, layers: list[int], window: int | None) -> Limits:
        """Return what layers keep, all of it on the host.

        First and newest tokens that the scorer protects, and the caller's spans, stay beyond the capacity too. What has
        left a sliding window is not among them.
        """
        assert batch.evict is not None and batch.prompts.capacity is not None
        held, evict, tokens = store.held[layers], batch.evict, batch.num_tokens
        mean = capacity = batch.prompts.capacity.expand(len(layers), -1)
        if batch.is_prefill:
            self._settled = None, {}
        elif not isinstance(self.policy.allocator, Uniform):
            capacity = self._settled_capacity(batch.prompts.capacity, layers)
        sinks, recent = (torch.as_tensor(x).expand_as(mean) for x in self.scorer.limits(batch.prompts.capacity))
        first = torch.zeros_like(tokens) if window is None else (tokens - window + 1).clamp_min(0)
        fixed = (tokens - first).minimum((sinks - first).clamp_min(0) + recent)
        if batch.prompts.protected is not None:
            ranks = torch.arange(batch.prompts.protected.shape[1])
            between = (ranks >= sinks.maximum(first)[..., None]) & (ranks < (tokens - recent)[..., None])
            fixed = fixed + (batch.prompts.protected & between).sum(-1)
        over = evict & (fixed > capacity) & (held.amax(2) > capacity)
        if bool(over.any()):
            self._note_over(over.any(0), fixed.where(over, 0).amax(0))
        keep, expired_to = capacity.maximum(fixed), torch.full_like(capacity, -1)
        if window is not None:
            keep, expired_to = keep.clamp_max(window), (tokens - window).expand_as(capacity)
        kept = held.minimum(keep[..., None]).where(evict[:, None], held)
        numbers = torch.stack([mean, sinks, tokens - recent, expired_to], 1)
        return Limits(kept, kept.flatten(1).int(), numbers, evict.clone())

    def _settled_capacity(self, capacity: Tensor, layers: list[int]) -> Tensor:
        """Return the tokens per KV head ``[n, B]`` that an allocator gave layers at the prompt's end."""
        settled = self.budgets.settled
        if self._settled[0] is not settled:
            self._settled = settled, {layer: x.cpu() for layer, x in settled.items()}
        return torch.stack([self._settled[1].get(layer, capacity) for layer in layers])
