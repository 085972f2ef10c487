"""Attention-Gates with a budget: the tokens with the highest gate probability stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ag.engine.observe import Observation
from ag.engine.scorers.base import Scorer


@dataclass(frozen=True, kw_only=True)
class Gates(Scorer):
    """The probability of the layer's gate, for a budget.

    Without a budget the flags decide; see :class:`ag.gates.gating.Gating`.

    In a layer without a gate all scores are equal, so that the first tokens stay.
    """

    reads_gates: ClassVar[bool] = True

    def score(self, seen: Observation) -> Tensor:
        """Return the probability, 1 without a gate."""
        return seen.gate if seen.gate is not None else seen.key_ranks.new_ones(seen.key_ranks.shape).float()
