"""SnapKV: the attention of the last queries of the prompt, pooled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import RowScorer, pooled
from ag.errors import require


@dataclass(frozen=True, kw_only=True)
class SnapKV(RowScorer):
    """``pool(mean_h sum_{i >= T - window} A_hip)``: what the last ``window`` of T queries attend to.

    The sum over these queries i is averaged over the query heads h of a KV head, and pooled along the tokens p before
    the window. The window's own tokens are kept.

    Source: Li et al. 2024, "SnapKV"; code FasterDecoding/SnapKV (its LongBench settings). Deviation: the mean over the
    query heads of a KV head, taken before pooling.

    Attributes:
        window: last queries that observe; their tokens are kept and count within the budget.
        kernel: width of the pooling, odd.
        pooling: ``max`` or ``avg``.
    """

    window: int = 32
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "window", self.window >= 1, "1 or more")
        require(self, "kernel", self.kernel >= 1 and self.kernel % 2 == 1, "an odd number")

    @cached_property
    def needs(self) -> Needs:
        """The sums over the window's queries, and the order of the tokens."""
        return Needs(
            attention_sums=self.window,
            key_valid=True,
            key_indices=True,
            slot_order=True,
            lookback=self.window - 1,
            observers=self.window,
        )

    def pool(self, inputs: ScorerInputs, score: Tensor, before_window: bool = True) -> Tensor:
        """Pool along the tokens before the window, or along all tokens."""
        inside = inputs.key_valid & (inputs.age >= self.window) if before_window else inputs.key_valid
        return pooled(score, inside, self.kernel, self.pooling, inputs.slot_order)

    def limits(self, capacity: Tensor) -> tuple[int, int]:
        """Return the sinks, and the window or the newest tokens."""
        return self.sinks, max(self.window, self.recent)
