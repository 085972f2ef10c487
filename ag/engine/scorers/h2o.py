"""H2O: the tokens with the largest sums of attention, and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ag.engine.attention_stats import AttentionStats
from ag.engine.records import Records, latest
from ag.engine.rows import Statistic, attention
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
        normalize: ``count`` divides by the number of counting queries that saw the key; as published it is not.
    """

    recent: int | float = 0.5  # type: ignore[assignment]
    window: int | None = None
    normalize: Literal["none", "count"] = "none"

    needs = Needs(rows=True, every_query=True, steady=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "recent", isinstance(self.recent, int) or self.recent <= 1, "tokens, or a share up to 1.0")
        require(self, "window", self.window is None or self.window >= 1, "1 or more, or None")

    def note(self, seen: AttentionStats, records: Records, statistic: Statistic = attention) -> None:
        """Add the sums over the new queries, or keep the rows of the prompt's window."""
        if self.window is None or seen.decoding:
            total = seen.total(statistic)
            if "sums" in records:
                records["sums"].add_(total)  # in place, so that it keeps its memory from step to step
            else:
                records["sums"] = total.clone()  # others may remember the total
        else:
            rows = seen.rows(self.window, only_new=True)
            latest(records, "window", rows.counted[:, None, :, None] * statistic(rows), rows.counted, self.window)

    def sums(self, seen: AttentionStats, statistic: Statistic = attention) -> Tensor:
        """Return the sums over all queries, or over the prompt's window and decoding; past weights do not change."""
        recorded = self.recorded(seen, statistic)
        if self.window is None:
            sums = recorded["sums"]
        else:
            sums = recorded["window"].sum(2)
            sums = sums + recorded["sums"] if seen.decoding else sums
        return sums if self.normalize == "none" else sums / self._queries(seen)

    def _queries(self, seen: AttentionStats) -> Tensor:
        """Return the number of counting queries that could see each key, ``[B, H, N]``."""
        first = torch.zeros_like(seen.lengths)
        if self.window is not None:
            first = (seen.prompt_lengths if seen.decoding else seen.lengths) - self.window
        # nothing is held that the last query does not see, so that all queries since then saw it
        since = seen.lengths[:, None, None] - seen.key_ranks.maximum(first[:, None, None])
        return since.clamp_min(1).repeat_interleave(seen.group, 1)

    def limits(self, capacity: Tensor) -> tuple[int, int | Tensor]:
        """Return the sinks and the newest tokens."""
        recent = self.recent
        return self.sinks, (capacity * recent).long() if isinstance(recent, float) else recent
