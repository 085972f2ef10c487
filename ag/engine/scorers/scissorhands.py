"""Scissorhands: attention over the last few hundred queries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ag.engine.records import Records, latest
from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import RowScorer
from ag.errors import require


@dataclass(frozen=True, kw_only=True)
class Scissorhands(RowScorer):
    """Attention summed over the last ``window`` queries.

    Source: Liu et al. 2023, "Scissorhands", in the reading of VATP (Guo et al. 2024): sliding sum, window 400, 10
    recents.

    Attributes:
        window: queries that count.
        recent: newest tokens that are kept.
    """

    window: int = 400
    recent: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "window", self.window >= 1, "1 or more")

    @cached_property
    def needs(self) -> Needs:
        """The rows of new queries."""
        return Needs(attention_rows=self.window, only_new=True, every_query=("attention_rows",))

    def note(self, inputs: ScorerInputs, records: Records) -> None:
        """Keep the rows of the window."""
        rows, valid = inputs.attention_rows
        latest(records, "rows", valid[:, None, :, None] * rows, valid, self.window)

    def sums(self, inputs: ScorerInputs) -> Tensor:
        """Return the sums over the window; earlier weights do not change."""
        return inputs.records["rows"].sum(2)
