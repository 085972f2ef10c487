"""StreamingLLM: the first and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import Scorer


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Scorer):
    """Attention sinks and a window of the newest tokens.

    Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"; code
    mit-han-lab/streaming-llm. Deviation: keys keep their original positions, unless the policy says
    ``positions="slot"``.

    Attributes:
        sinks: first tokens that are kept.
    """

    sinks: int = 4
    alone: ClassVar[str] = "its score is the position alone"
    needs = Needs(key_indices=True, steady=True)

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the position."""
        return inputs.key_indices.float()
