"""Turn scores into keep masks under a budget."""

from __future__ import annotations

import warnings
from typing import NoReturn

import torch
from torch import Tensor

from ag.engine.allocators.base import Candidates, LayerBudgets
from ag.engine.attention_stats import AttentionStats
from ag.engine.policy import Policy
from ag.engine.records import Records
from ag.errors import BudgetWarning, UserError


class NonFiniteScoreError(UserError, FloatingPointError):
    """A scorer gave NaN or infinity where a token competes."""


class Decision:
    """Decides, prompt by prompt, what each layer keeps.

    Args:
        policy: with a scorer and a budget.
        layers: indices of the layers that share the budget, ascending.
    """

    def __init__(self, policy: Policy, layers: list[int]) -> None:
        self.policy, self.budgets = policy, LayerBudgets(layers)
        self._of: Tensor | None = None  # prompts that the capacity was last asked for

    def decide(
        self, seen: AttentionStats, due: Tensor | None = None, records: Records | None = None
    ) -> dict[int, Tensor]:
        """Take in a layer and return masks ``[B, Hkv, N]`` of what stays, of it and of the layers where something goes.

        Of sequences that are not ``due`` all stays. The scorer first takes note of the layer in ``records``.

        Raises:
            NonFiniteScoreError: (a FloatingPointError) when a score is not finite, naming layer and scorer.
        """
        everyone, allocator = due is None, self.policy.allocator
        due = torch.ones(len(seen.q), dtype=torch.bool, device=seen.q.device) if due is None else due
        candidates = self._candidates(seen, due, records)
        candidates.everyone = everyone
        self._let_through(candidates, seen.layer)
        if seen.decoding:
            return {seen.layer: allocator.keep_later(seen.layer, candidates, self.budgets)}
        return {**allocator.keep(seen.layer, candidates, self.budgets)}

    # ---- how it decides

    def _candidates(self, seen: AttentionStats, due: Tensor, records: Records | None) -> Candidates:
        scorer, allocator = self.policy.scorer, self.policy.allocator
        assert scorer is not None
        if self.budgets.over_budget is None:
            self.budgets.over_budget = torch.zeros(len(seen.q), dtype=torch.bool)
        capacity = self._capacity(seen.prompt_lengths)
        seen.due, seen.capacity = due, capacity
        if records is not None:
            scorer.note(seen, records)
        wish = None if seen.decoding else allocator.wish(seen)
        score, protected, valid = scorer.score(seen), scorer.protected(seen, capacity), seen.key_valid
        if seen.sliding_window is not None:  # what other sequences hold for queries that are looked back at later
            valid = valid | (seen.keys.valid & ~due[:, None, None])
        for what, found in (("score", score), ("protected", protected)):
            if getattr(found, "shape", None) != seen.keys.shape:
                self.refuse_shape(what, found, seen)
        protected = protected if seen.stays is None else protected | seen.stays
        second, first_share = scorer.second(seen, score) or (None, 1.0)
        return Candidates(
            score,
            protected,
            valid,
            capacity,
            seen.prompt_lengths,
            due,
            preference=wish,
            second=second,
            first_share=first_share,
            ranks=None if seen.keys.ordered else seen.keys.ranks,
        )

    def refuse_shape(self, what: str, found: object, seen: AttentionStats) -> NoReturn:
        """Raise for what a method of the scorer gave for a layer: it has not one entry for each slot."""
        gave = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise UserError(
            f"{type(self.policy.scorer).__name__}.{what} of {self.policy!r} gave {gave} in layer {seen.layer}: "
            f"expected a tensor [B, Hkv, N], here {list(seen.keys.shape)}."
        )

    def _let_through(self, candidates: Candidates, layer: int) -> None:
        """Refuse scores that are not finite, and let what is protected exceed the budget."""
        finite = candidates.finite
        if bool((candidates.over | ~finite).any()):  # the host waits once for what is rare
            if not bool((finite | ~candidates.due).all()):
                self.refuse_scores(layer)
            self._give_way(candidates)

    def refuse_scores(self, layer: int) -> NoReturn:
        """Raise for a score that is not finite."""
        raise NonFiniteScoreError(
            f"{type(self.policy.scorer).__name__}.score of {self.policy!r} gave NaN or infinity in layer {layer}: "
            "expected finite numbers for all tokens that compete; look at the scorer and at the weights."
        )

    def _capacity(self, tokens: Tensor) -> Tensor:
        """Return the policy's capacity of prompts ``[B]``, which are the same for many layers and passes."""
        if self._of is not tokens:
            self._of, self._allowed = tokens, self.policy.capacity(tokens)
        return self._allowed

    def _give_way(self, candidates: Candidates) -> None:
        """Let what is protected exceed the budget where something has to go."""
        tight = candidates.tight
        if not bool(tight.any()):
            return
        self.note_over(tight.cpu(), candidates.fixed.cpu())
        candidates.capacity = candidates.fixed.where(tight, candidates.capacity)

    def note_over(self, over: Tensor, fixed: Tensor) -> None:
        """Take note of sequences ``[B]`` that protect ``fixed`` ``[B]`` tokens per KV head, more than the budget.

        The first ones are warned of.
        """
        known = self.budgets.over_budget
        if known is None:
            known = torch.zeros(len(over), dtype=torch.bool)
        if not known.any():
            warnings.warn(  # the same text for every prompt, so that Python shows it once
                f"{self.policy!r} protects {int(fixed[int(over.long().argmax())])} tokens per KV head (sinks, recent, "
                "window, protect), more than its budget allows here, and keeps them all; give a larger budget or "
                "protect less.",
                BudgetWarning,
                stacklevel=2,
            )
        self.budgets.over_budget = known | over
