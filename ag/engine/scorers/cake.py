"""CAKE's indicator: attention that is high, or that varies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

from torch import Tensor

from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class Cake(SnapKV):
    """Mean plus ``gamma`` times the variance of the attention over an observation window, pooled.

    Source: "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences", code antgroup/cakekv. The layer
    budgets of this paper are the allocator ``preference``.

    Attributes:
        gamma: weight of the variance.
    """

    kernel: int = 5
    pooling: Literal["max", "avg"] = "avg"
    gamma: float = 200.0
    default_allocator: ClassVar[str] = "preference"

    @cached_property
    def needs(self) -> Needs:
        """Mean and variance over the window's queries, in place of the sums."""
        return replace(self.summing.needs, attention_sums=None, attention_moments=self.window)

    @cached_property
    def decode_needs(self) -> Needs:
        """The attention of the newest query."""
        return replace(self.summing.needs, attention_sums=1, lookback=0)

    @cached_property
    def summing(self) -> SnapKV:
        """SnapKV with this window and pooling: the sums of another statistic have no mean and variance to combine."""
        return SnapKV(
            sinks=self.sinks, recent=self.recent, window=self.window, kernel=self.kernel, pooling=self.pooling
        )

    def sums(self, inputs: ScorerInputs) -> Tensor:
        """Return the indicator; while decoding, the attention of the newest query alone, as officially."""
        if inputs.decoding:
            return inputs.attention_sums
        mean, variance = inputs.attention_moments
        return mean + self.gamma * variance
