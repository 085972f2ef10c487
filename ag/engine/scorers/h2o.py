"""H2O: the tokens that were paid most attention, and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ag.engine.observe import Observation, Statistic, attention
from ag.engine.scorers.base import RowScorer
from ag.errors import require


@dataclass(frozen=True, kw_only=True)
class H2O(RowScorer):
    """Attention summed over every query of the prompt, without normalisation.

    Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle"; code FMInference/H2O. Deviations: the mean over the query
    heads of a KV head (the paper has one each); sequences of a batch are kept apart; sums are float32.

    Attributes:
        recent: newest tokens that stay: a number, or a share of the budget.
        window: of the prompt's queries, count only so many of the last instead of all.
    """

    recent: int | float = 0.5  # type: ignore[assignment]
    window: int | None = None
    follows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        require(self, "recent", isinstance(self.recent, int) or self.recent <= 1, "tokens, or a share up to 1.0")
        require(self, "window", self.window is None or self.window >= 1, "1 or more, or None")

    def sums(self, seen: Observation, statistic: Statistic = attention) -> Tensor:
        """Return the sums over all queries, or those of the prompt's window and of decoding, as they were when seen."""
        if self.window is None or seen.decoding:
            decoded = seen.accumulated("sums", seen.total(statistic))
            return decoded if self.window is None else decoded + seen.memory["window"].sum(2)
        rows = seen.rows(self.window, only_new=True)
        return seen.latest("window", rows.counted[:, None, :, None] * statistic(rows), rows.counted, self.window).sum(2)

    def protected(self, seen: Observation, capacity: Tensor) -> Tensor:
        """Return the sinks and the newest tokens."""
        share = isinstance(self.recent, float)
        recent = (capacity * self.recent).long()[:, None, None] if share else self.recent
        return (seen.key_ranks < self.sinks) | (seen.age < recent)
