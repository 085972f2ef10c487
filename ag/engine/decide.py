"""Turn scores into keep masks under a budget."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ag.engine.allocators.base import Ballot, Shares
from ag.engine.observe import Observation
from ag.engine.policy import Policy
from ag.engine.records import Records
from ag.engine.select import Leaving
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
        self.policy, self.shares = policy, Shares(layers)
        self._of: Tensor | None = None  # tokens that the capacity was last asked for

    def decide(
        self, seen: Observation, due: Tensor | None = None, records: Records | None = None
    ) -> dict[int, Tensor | Leaving]:
        """Take in a layer and return masks ``[B, Hkv, N]`` of what stays, of it and of the layers where something goes.

        While decoding it may be one token of each head that goes, in place of a mask.

        Args:
            seen: the layer.
            due: ``[B]`` bool, sequences of which something may go; the others keep all. None: every one.
            records: those of the layer, in which the scorer takes note of it first; None: nobody keeps any.

        Raises:
            UserError: under ``strict=True``, when the budget is smaller than what the policy protects, and something
                has to go.
            NonFiniteScoreError: (a FloatingPointError) when a score is not finite, naming layer and scorer.
        """
        everyone, allocator = due is None, self.policy.allocator
        due = torch.ones(len(seen.q), dtype=torch.bool, device=seen.q.device) if due is None else due
        ballot = self._ballot(seen, due, records)
        ballot.everyone = everyone
        if seen.decoding:
            found = allocator.keep_later(seen.layer, ballot, self.shares)
            # attention takes a mask, and of a layer with a window goes what no later query sees, too
            if isinstance(found, Leaving) and (self.policy.evict_before_attend or seen.sliding_window is not None):
                found = found.mask(ballot.valid)
            return {seen.layer: found}
        return {**allocator.keep(seen.layer, ballot, self.shares)}

    def _ballot(self, seen: Observation, due: Tensor, records: Records | None) -> Ballot:
        scorer, allocator = self.policy.scorer, self.policy.allocator
        assert scorer is not None
        grows = self.policy.budget_of == "seen"
        capacity = self._capacity(seen.lengths if grows else seen.prompt_lengths)
        seen = seen.deciding(due, capacity)
        if records is not None:
            scorer.note(seen, records)
        wish = None if seen.decoding else allocator.wish(seen)
        score, protected, valid = scorer.score(seen), scorer.protected(seen, capacity), seen.key_valid
        for what, found in (("score", score), ("protected", protected)):
            if getattr(found, "shape", None) != valid.shape:
                gave = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
                raise UserError(
                    f"{type(scorer).__name__}.{what} of {self.policy!r} gave {gave} in layer {seen.layer}: expected a "
                    f"tensor [B, Hkv, N], here {list(valid.shape)}."
                )
        second, first_share = scorer.second(seen, score) or (None, 1.0)
        ballot = Ballot(
            score,
            protected,
            valid,
            capacity,
            seen.prompt_lengths,
            due,
            preference=wish,
            second=second,
            first_share=first_share,
            ranks=seen.unordered_ranks,
        )
        if grows:
            ballot.prompt_capacity = self.policy.capacity(seen.prompt_lengths)
        finite = ballot.worst.finite.all(1)
        if bool((ballot.over | ~finite).any()):  # the host waits once for what is rare
            if not bool((finite | ~due).all()):
                raise NonFiniteScoreError(
                    f"{type(scorer).__name__}.score of {self.policy!r} gave NaN or infinity in layer {seen.layer}: "
                    "expected finite numbers for all tokens that compete; look at the scorer and at the weights."
                )
            self._give_way(ballot)
        return ballot

    def _capacity(self, tokens: Tensor) -> Tensor:
        """Return the policy's capacity of so many tokens ``[B]``, which are the same for many layers and passes."""
        if self._of is not tokens:
            self._of, self._allowed = tokens, self.policy.capacity(tokens)
        return self._allowed

    def _give_way(self, ballot: Ballot) -> None:
        """Let what is protected exceed the budget where something has to go, or refuse that."""
        tight = ballot.tight
        if not bool(tight.any()):
            return
        row = int(tight.long().argmax())
        if self.policy.strict:
            raise UserError(
                f"{self.policy!r}: {int(ballot.capacity[row])} tokens per KV head are fewer than the "
                f"{int(ballot.fixed[row])} that it protects (sinks, recent, window); give a larger budget, protect "
                "less, or leave strict=True out, so that they stay."
            )
        if self.shares.over_budget is None:
            warnings.warn(  # the same text for every prompt, so that Python shows it once
                f"{self.policy!r} protects {int(ballot.fixed[row])} tokens per KV head (sinks, recent, window), more "
                "than its budget allows here, and keeps them all; give a larger budget, protect less, or strict=True, "
                "which makes it an error.",
                BudgetWarning,
                stacklevel=2,
            )
        known = self.shares.over_budget
        self.shares.over_budget = tight.cpu() if known is None else known | tight.cpu()
        ballot.capacity = ballot.fixed.where(tight, ballot.capacity)
