"""CAKE's indicator: attention that is high, or that varies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ag.engine.scorer_inputs import ScorerInputs
from ag.engine.scorers.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class Cake(SnapKV):
    """Mean plus ``gamma`` times the variance of the attention over an observation window, pooled.

    Source: "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences", code antgroup/cakekv. The layer
    budgets of the same paper are the allocator ``preference``.

    Attributes:
        gamma: weight of the variance.
    """

    kernel: int = 5
    pooling: Literal["max", "avg"] = "avg"
    gamma: float = 200.0
    default_allocator: ClassVar[str] = "preference"

    def raw(self, inputs: ScorerInputs) -> Tensor:
        """Return the indicator; while decoding, the attention of the newest query alone, as officially."""
        if inputs.decoding:
            return inputs.newest()
        mean, variance = inputs.rows(self.window).moments
        return mean + self.gamma * variance
