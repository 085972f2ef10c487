"""StreamingLLM: the first tokens and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ag.engine.scorer_inputs import ScorerInputs
from ag.engine.scorers.base import Needs, Scorer


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Scorer):
    """Attention sinks and a window of the newest tokens.

    Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"; code
    mit-han-lab/streaming-llm. Deviation: keys keep their original positions, unless the policy says
    ``positions="slot"``.

    Attributes:
        sinks: first tokens that stay.
    """

    sinks: int = 4
    alone: ClassVar[str] = "its score is the position alone"
    needs = Needs(steady=True)

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the position."""
        return inputs.key_indices.float()
