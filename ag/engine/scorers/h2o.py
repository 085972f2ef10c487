"""H2O: the tokens with the largest sums of attention, and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ag.engine.records import Records, latest
from ag.engine.rows import Statistic, attention
from ag.engine.scorer_inputs import ScorerInputs
from ag.engine.scorers.base import Needs, RowScorer
from ag.errors import require


@dataclass(frozen=True, kw_only=True)
class H2O(RowScorer):
    """Attention summed over every query of the prompt, without normalisation.

    Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle"; code FMInference/H2O. Deviations: the mean over the query
    heads of a KV head (the paper has one each); sequences of a batch are kept apart; sums are float32.

    Attributes:
        recent: newest tokens that stay: a number, or a share of the budget.
        window: count only this many of the prompt's last queries; None means that all count.
    """

    recent: int | float = 0.5  # type: ignore[assignment]
    window: int | None = None

    needs = Needs(rows=True, every_query=True, steady=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "recent", isinstance(self.recent, int) or self.recent <= 1, "tokens, or a share up to 1.0")
        require(self, "window", self.window is None or self.window >= 1, "1 or more, or None")

    def note(self, inputs: ScorerInputs, records: Records, statistic: Statistic = attention) -> None:
        """Add the sums over the new queries, or keep the rows of the prompt's window."""
        if self.window is None or inputs.decoding:
            total = inputs.total(statistic)
            if "sums" in records:
                records["sums"].add_(total)  # in place, so that it keeps its memory from step to step
            else:
                records["sums"] = total.clone()  # others may remember the total
        else:
            rows = inputs.rows(self.window, only_new=True)
            latest(records, "window", rows.counted[:, None, :, None] * statistic(rows), rows.counted, self.window)

    def sums(self, inputs: ScorerInputs, statistic: Statistic = attention) -> Tensor:
        """Return the sums over all queries, or over the prompt's window and decoding; past weights do not change."""
        recorded = self.recorded(inputs, statistic)
        if self.window is None:
            return recorded["sums"]
        sums = recorded["window"].sum(2)
        return sums + recorded["sums"] if inputs.decoding else sums

    def limits(self, capacity: Tensor) -> tuple[int, int | Tensor]:
        """Return the sinks and the newest tokens."""
        recent = self.recent
        return self.sinks, (capacity * recent).long() if isinstance(recent, float) else recent
