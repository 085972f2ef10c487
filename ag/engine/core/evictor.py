"""Turn scores into what stays of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ag.engine.allocators.uniform import Uniform
from ag.engine.core.sequences import ForwardBatch
from ag.engine.decide import Decision
from ag.engine.observe import Observation
from ag.engine.policy import Policy
from ag.engine.scorers.base import Scorer
from ag.engine.select import filling_order
from ag.kernels.kv_compact import Worst

if TYPE_CHECKING:
    from ag.engine.core.kv_store import KVStore, Records


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
        self.policy, self.scorer = policy, policy.scorer
        self.decision = Decision(policy, layers)
        self.decision.closing = filling_order
        one_score = type(self.scorer).second is Scorer.second
        self._counts_prompt = one_score and isinstance(policy.allocator, Uniform)
        self._counts_later = one_score and not policy.allocator.compares_heads
        self._found: Tensor | None = None  # [1] int32, whether a score was not finite

    def evict(self, seen: Observation, batch: ForwardBatch, store: KVStore, records: Records) -> None:
        """Let the scorer note the pass, and drop what exceeds the budget, from earlier layers too where these compete.

        Args:
            seen: what the scorer is shown of the layer at hand.
            batch: the pass.
            store: rows of all layers.
            records: what the scorer noted of the slots that it is shown; it may note more there.

        Raises:
            NonFiniteScoreError: when the score of a token that competes is not finite, naming layer and scorer.
        """
        assert batch.evict is not None
        if self._counts_prompt if batch.is_prefill else self._counts_later:
            self._drop_worst(seen, batch, store, records)
            return
        due = None if bool(batch.evict.all()) else batch.evict.to(seen.q.device)
        masks = self.decision.decide(seen, due, records)
        store.put_records(seen.layer, records)
        for index, keep in masks.items():
            kept = keep.sum(-1).cpu()
            if bool((kept < store.held[index]).any()):
                store.compact(index, keep, kept)

    def _drop_worst(self, seen: Observation, batch: ForwardBatch, store: KVStore, records: Records) -> None:
        """Drop the worst tokens of each row down to a number that the host knows."""
        assert batch.evict is not None
        layer, device = seen.layer, seen.q.device
        capacity = self._capacity(batch, layer)
        seen = seen.deciding(batch.evict.to(device), capacity.to(device))
        self.scorer.note(seen, records)
        store.put_records(layer, records)
        score = self.scorer.score(seen)
        sinks, recent = (torch.as_tensor(x).expand_as(capacity) for x in self.scorer.limits(capacity))
        fixed = num_protected(batch, sinks, recent, seen.sliding_window)
        expired_to = torch.full_like(capacity, -1)
        keep = capacity.maximum(fixed)
        if seen.sliding_window is not None:
            expired_to = batch.num_tokens - seen.sliding_window
            keep = keep.clamp_max(seen.sliding_window)
        held = store.held[layer]
        kept = held.minimum(keep[:, None]).where(batch.evict[:, None], held)
        over = batch.evict & (fixed > capacity) & (held.amax(1) > capacity)
        if bool(over.any()):
            self.decision.note_over(over, fixed)
        if bool((kept < held).any()):
            if self._found is None:
                self._found = torch.zeros(1, dtype=torch.int32, device=device)
            marks = batch.protected
            worst = Worst(
                stays=kept.flatten().int().to(device),
                score=score,
                sinks=sinks.to(device).contiguous(),
                recent_from=(batch.num_tokens - recent).to(device),
                expired_to=expired_to.to(device),
                found=self._found,
                protected=None if marks is None else marks.to(device).contiguous(),
            )
            store.compact(layer, worst, kept)
            if int(self._found):
                self._found.zero_()
                self.decision.refuse_scores(layer)

    def _capacity(self, batch: ForwardBatch, layer: int) -> Tensor:
        """Return the tokens per KV head ``[B]`` that a layer may keep, on the host."""
        capacity = self.policy.capacity(batch.prompt_len)
        if batch.is_prefill or isinstance(self.policy.allocator, Uniform):
            return capacity
        settled = self.decision.budgets.settled.get(layer)
        return capacity if settled is None else settled.cpu()


def num_protected(batch: ForwardBatch, sinks: Tensor, recent: Tensor, window: int | None) -> Tensor:
    """Return how many tokens of each sequence never go, ``[B]`` long: so many first and newest ones, and spans.

    What has left a sliding window is not among them.
    """
    first = (batch.num_tokens - window + 1).clamp_min(0) if window else torch.zeros_like(batch.num_tokens)
    ends = (batch.num_tokens - first).minimum((sinks - first).clamp_min(0) + recent)
    if batch.protected is None:
        return ends
    ranks = torch.arange(batch.protected.shape[1])
    between = (ranks >= sinks.maximum(first)[:, None]) & (ranks < (batch.num_tokens - recent)[:, None])
    return ends + (batch.protected & between).sum(1)
