"""Scissorhands: attention over the last few hundred queries."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ag.engine.records import Records, latest
from ag.engine.rows import Statistic, attention
from ag.engine.scorer_inputs import ScorerInputs
from ag.engine.scorers.base import Needs, RowScorer
from ag.errors import require


@dataclass(frozen=True, kw_only=True)
class Scissorhands(RowScorer):
    """Attention summed over the last ``window`` queries.

    Source: Liu et al. 2023, "Scissorhands", in the reading of VATP (Guo et al. 2024): sliding sum, window 400, 10
    recents.

    Attributes:
        window: queries that count.
        recent: newest tokens that stay.
    """

    window: int = 400
    recent: int = 10

    needs = Needs(rows=True, every_query=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "window", self.window >= 1, "1 or more")

    def note(self, inputs: ScorerInputs, records: Records, statistic: Statistic = attention) -> None:
        """Keep the rows of the window."""
        rows = inputs.rows(self.window, only_new=True)
        latest(records, "rows", rows.counted[:, None, :, None] * statistic(rows), rows.counted, self.window)

    def sums(self, inputs: ScorerInputs, statistic: Statistic = attention) -> Tensor:
        """Return the sums over the window; past weights do not change."""
        return self.recorded(inputs, statistic)["rows"].sum(2)
