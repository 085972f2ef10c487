"""Turn scores into what stays of each layer."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ag.engine.allocators.uniform import Uniform
from ag.engine.decide import Decision
from ag.engine.forward_batch import ForwardBatch
from ag.engine.observe import Observation
from ag.engine.policy import Policy
from ag.engine.scorers.base import Scorer
from ag.kernels.kv_compact import Worst

if TYPE_CHECKING:
    from ag.engine.kv_store import KVStore
    from ag.engine.records import Records


LOOK = 16  # evicting steps after which the host looks whether scores were finite


class Limits(NamedTuple):
    """What n layers keep of each sequence, counted on the host."""

    kept: Tensor  # [n, B, Hkv] long on the host, tokens that stay
    stays: Tensor  # [n, B Hkv] int32, the same for the kernel
    numbers: Tensor  # [n, 4, B] long: capacity, sinks, the first recent rank, the last expired one
    due: Tensor  # [B] bool, sequences of which something may go


class Evictor:
    """Decides for the layers of a cache what goes, and drops it.

    Where every head keeps a number of tokens that the host knows, a kernel finds the worst ones of each row
    (:class:`ag.kernels.kv_compact.Worst`), and the device is not asked. Where heads or layers compete, their scores
    are compared by PyTorch, and the device is asked once how many stayed.

    Args:
        policy: with a scorer and a budget.
        layers: indices of the layers that share the budget, ascending.
    """

    def __init__(self, policy: Policy, layers: list[int]) -> None:
        assert policy.scorer is not None
        self.policy, self.scorer, self.layers = policy, policy.scorer, layers
        self.decision = Decision(policy, layers)
        kind = type(self.scorer)
        plain = kind.second is Scorer.second and kind.protected is Scorer.protected  # limits say what is protected
        self._counts_prompt = plain and isinstance(policy.allocator, Uniform)
        self._counts_later = plain and not policy.allocator.compares_heads
        #: Whether the host counted what the step at hand keeps, so that it is the same operations at each step.
        self.counted = False
        self._step: Limits | None = None  # of such a step, on the device in the same memory at each
        self._settled: tuple[Any, dict[int, Tensor]] = None, {}  # the layers' budgets, and the same on the host
        self._found: Tensor | None = None  # [n] int32 on the device, layers in which a score was not finite
        self._looked = 0  # steps since the host looked there

    def fork(self) -> Evictor:
        """Return a copy for another continuation of the same text."""
        new = copy(self)
        new.decision = deepcopy(self.decision, {id(self.policy): self.policy})
        new._step = new._found = None
        return new

    # ---- a pass

    def begin_step(self, batch: ForwardBatch, store: KVStore, window: int | None) -> None:
        """Count what a step keeps of all layers, and put it where the kernel reads it.

        Args:
            batch: the step.
            store: rows of all layers, whose ``held`` counts the new tokens.
            window: sliding window of the layers that share the budget; None means that they have none.
        """
        self.counted = batch.evict is not None and self._counts_later and not store.rotation.turns
        if not self.counted:
            return
        limits, old = self._limits(batch, store, self.layers, window), self._step
        store.make_own(slice(None), self._of_all_layers(limits, store))
        if old is None or old.kept.shape != limits.kept.shape:
            self._step = _on(store.table.device, limits)
        else:
            for there, here in zip(old[1:], limits[1:], strict=True):
                there.copy_(here, non_blocking=True)  # the host does not wait, as its memory is not pinned
            self._step = old._replace(kept=limits.kept)

    def evict(self, seen: Observation, batch: ForwardBatch, store: KVStore, records: Records) -> None:
        """Let the scorer note the pass, and drop what exceeds the budget, from earlier layers too where these compete.

        Args:
            seen: what the scorer is shown of the layer at hand.
            batch: the pass.
            store: rows of all layers.
            records: what the scorer noted of the slots that it is shown; it may note more there.
        """
        assert batch.evict is not None
        layer, place = seen.layer, self.layers.index(seen.layer)
        if batch.step and self.counted:
            assert self._step is not None
            store.drop(layer, self._worst(seen, batch, store, records, self._step, place))
        elif self._counts_prompt if batch.is_prefill else self._counts_later:
            limits = self._limits(batch, store, [layer], seen.sliding_window)
            worst = self._worst(seen, batch, store, records, _on(seen.q.device, limits), 0)
            if bool((limits.kept[0] < store.held[layer]).any()):
                store.compact(layer, worst, limits.kept[0])
        else:
            due = None if bool(batch.evict.all()) else batch.evict.to(seen.q.device)
            masks = self.decision.decide(seen, due, records)
            store.put_records(layer, records)
            for index, keep in masks.items():
                kept = keep.sum(-1).cpu()
                if bool((kept < store.held[index]).any()):
                    store.compact(index, keep, kept)

    def end_pass(self, batch: ForwardBatch, store: KVStore) -> None:
        """Count what a step dropped, and look whether scores were finite.

        Raises:
            NonFiniteScoreError: when the score of a token that competes was not finite, naming layer and scorer. Behind
                a step the host looks once in a while, as it waits for the device.
        """
        if batch.step and self.counted:
            assert self._step is not None
            store.set_held(slice(None), self._of_all_layers(self._step, store))
        if batch.evict is not None:
            self.look(LOOK if batch.step else 1)

    def look(self, steps: int = 1) -> None:
        """Look, at each call or at one of so many, whether scores were finite; raises as :meth:`end_pass` says."""
        self._looked = (self._looked + 1) % steps
        if self._looked or self._found is None:
            return
        found = self._found.tolist()
        if any(found):
            self._found.zero_()
            self.decision.refuse_scores(self.layers[found.index(1)])

    # ---- what the host counts

    def _worst(
        self, seen: Observation, batch: ForwardBatch, store: KVStore, records: Records, limits: Limits, place: int
    ) -> Worst:
        """Let the scorer note and score a layer; return which of its tokens go, the layer being that many of n."""
        capacity, sinks, recent_from, expired_to = limits.numbers[place].unbind()
        seen = seen.deciding(limits.due, capacity)
        self.scorer.note(seen, records)
        store.put_records(seen.layer, records)
        if self._found is None:
            self._found = torch.zeros(len(self.layers), dtype=torch.int32, device=seen.q.device)
        score, found = self.scorer.score(seen), self.layers.index(seen.layer)
        self.decision.check_shape("score", score, seen)
        return Worst(
            stays=limits.stays[place],
            score=score.float(),
            sinks=sinks,
            recent_from=recent_from,
            expired_to=expired_to,
            found=self._found[found : found + 1],
            protected=batch.protected_there,
        )

    def _limits(self, batch: ForwardBatch, store: KVStore, layers: list[int], window: int | None) -> Limits:
        """Return what layers keep, all of it on the host."""
        assert batch.evict is not None
        held, evict, tokens = store.held[layers], batch.evict, batch.num_tokens
        capacity = self._capacity(batch, layers)
        flat = capacity.flatten()
        sinks, recent = (torch.as_tensor(x).expand_as(flat).view_as(capacity) for x in self.scorer.limits(flat))
        fixed = num_protected(batch, sinks, recent, window)
        over = evict & (fixed > capacity) & (held.amax(2) > capacity)
        if bool(over.any()):
            self.decision.note_over(over.any(0), fixed.where(over, 0).amax(0))
        keep, expired_to = capacity.maximum(fixed), torch.full_like(capacity, -1)
        if window is not None:
            keep, expired_to = keep.clamp_max(window), (tokens - window).expand_as(capacity)
        kept = held.minimum(keep[..., None]).where(evict[:, None], held)
        numbers = torch.stack([capacity, sinks, tokens - recent, expired_to], 1)
        return Limits(kept, kept.flatten(1).int(), numbers, evict.clone())

    def _of_all_layers(self, limits: Limits, store: KVStore) -> Tensor:
        """Return how many tokens of each row stay where those that share the budget have these limits."""
        if len(self.layers) == store.layers:
            return limits.kept
        kept = store.held.clone()
        kept[self.layers] = limits.kept
        return kept

    def _capacity(self, batch: ForwardBatch, layers: list[int]) -> Tensor:
        """Return the tokens per KV head ``[n, B]`` that layers may keep."""
        capacity = self.policy.capacity(batch.prompt_len)
        if batch.is_prefill or isinstance(self.policy.allocator, Uniform):
            self._settled = None, {}
            return capacity.expand(len(layers), -1)
        settled = self.decision.budgets.settled
        if self._settled[0] is not settled:
            self._settled = settled, {layer: x.cpu() for layer, x in settled.items()}
        return torch.stack([self._settled[1].get(layer, capacity) for layer in layers])


def _on(device: torch.device, limits: Limits) -> Limits:
    """Return limits whose parts for kernels lie on a device."""
    return Limits(limits.kept, *(x.to(device) for x in limits[1:]))


def num_protected(batch: ForwardBatch, sinks: Tensor, recent: Tensor, window: int | None) -> Tensor:
    """Return how many tokens of each sequence never go, ``[n, B]`` long: so many first and newest ones, and spans.

    What has left a sliding window is not among them.
    """
    first = (batch.num_tokens - window + 1).clamp_min(0) if window else torch.zeros_like(batch.num_tokens)
    ends = (batch.num_tokens - first).minimum((sinks - first).clamp_min(0) + recent)
    if batch.protected is None:
        return ends
    ranks = torch.arange(batch.protected.shape[1])
    between = (ranks >= sinks.maximum(first)[..., None]) & (ranks < (batch.num_tokens - recent)[..., None])
    return ends + (batch.protected & between).sum(-1)
