"""Scissorhands: attention over the last few hundred queries."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ag.engine.attention_stats import AttentionStats
from ag.engine.records import Records, latest
from ag.engine.rows import AttentionRows, Statistic, attention
from ag.engine.scorers.base import Needs, RowScorer
from ag.errors import require


@dataclass(frozen=True, kw_only=True)
class Scissorhands(RowScorer):
    """Attention summed over the last ``window`` queries, or how often it was not below the uniform level.

    Source: Liu et al. 2023, "Scissorhands", in the reading of VATP (Guo et al. 2024): sliding sum, window 400, 10
    recents.

    Attributes:
        window: queries that count.
        count: count the queries with a weight of at least ``1 / t`` (t: keys that the query sees) instead of summing.
        recent: newest tokens that stay.
    """

    window: int = 400
    count: bool = False
    recent: int = 10

    needs = Needs(rows=True, every_query=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "window", self.window >= 1, "1 or more")

    def note(self, seen: AttentionStats, records: Records, statistic: Statistic = attention) -> None:
        """Keep the rows of the window."""
        statistic = _above_uniform if self.count and statistic is attention else statistic
        rows = seen.rows(self.window, only_new=True)
        latest(records, "rows", rows.counted[:, None, :, None] * statistic(rows), rows.counted, self.window)

    def sums(self, seen: AttentionStats, statistic: Statistic = attention) -> Tensor:
        """Return the sums over the window; past weights do not change."""
        return self.recorded(seen, statistic)["rows"].sum(2)


def _above_uniform(rows: AttentionRows) -> Tensor:
    level = 1 / rows.visible.sum(
        -1, keepdim=True
    )  # multiplied by t, uniform attention would round to below 1 in float32
    return (rows.visible & (rows.a >= level)).float()
