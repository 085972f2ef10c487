"""H2O: the tokens with the largest sums of attention, and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ag.engine.records import Records, latest
from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import RowScorer
from ag.errors import require
from ag.retention import share_of

NEW_QUERIES = Needs(attention_sums="new", every_query=("attention_sums",), steady=True)


@dataclass(frozen=True, kw_only=True)
class H2O(RowScorer):
    """``sum_i A_ip``: attention summed over every query so far, without normalisation.

    Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle"; code FMInference/H2O. Deviations: the mean over the query
    heads of a KV head (the paper has one query head for each KV head); sequences of a batch are kept apart; sums are
    float32.

    Attributes:
        recent: newest tokens that are kept: a number, or a share of the budget.
        window: count only this many of the prompt's last queries. None: all queries count.
    """

    recent: int | float = 0.5  # type: ignore[assignment]
    window: int | None = None
    decode_needs = NEW_QUERIES

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "recent", isinstance(self.recent, int) or self.recent <= 1, "tokens, or a share up to 1.0")
        require(self, "window", self.window is None or self.window >= 1, "1 or more, or None")

    @cached_property
    def needs(self) -> Needs:
        """The sums over new queries; with a window its rows, as earlier queries leave it one by one."""
        if self.window is None:
            return NEW_QUERIES
        return Needs(attention_rows=self.window, only_new=True, every_query=("attention_rows",), steady=True)

    def note(self, inputs: ScorerInputs, records: Records) -> None:
        """Add the sums over the new queries, or keep the rows of the prompt's window."""
        if self.window is not None and not inputs.decoding:
            rows, valid = inputs.attention_rows
            latest(records, "window", valid[:, None, :, None] * rows, valid, self.window)
        elif "sums" in records:
            records["sums"].add_(inputs.attention_sums)  # in place: the sums keep their memory from step to step
        else:
            records["sums"] = inputs.attention_sums.clone()  # the engine may keep the original for other caches

    def sums(self, inputs: ScorerInputs) -> Tensor:
        """Return the sums over all queries, or over the prompt's window and all later queries."""
        if self.window is None:
            return inputs.records["sums"]
        sums = inputs.records["window"].sum(2)
        return sums + inputs.records["sums"] if inputs.decoding else sums

    def limits(self, capacity: Tensor) -> tuple[int, int | Tensor]:
        """Return the sinks and the newest tokens."""
        recent = self.recent
        return self.sinks, share_of(capacity, recent) if isinstance(recent, float) else recent
