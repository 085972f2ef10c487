"""CAKE's indicator: attention that is high, or that varies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ag.engine.observe import Observation
from ag.engine.records import Records
from ag.engine.rows import Statistic, attention
from ag.engine.scorers.base import pooled
from ag.engine.scorers.snapkv import SnapKV
from ag.engine.select import sorted_slots
from ag.errors import require


@dataclass(frozen=True, kw_only=True)
class Cake(SnapKV):
    """Mean plus ``gamma`` times the variance of the attention over an observation window, pooled.

    Source: "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences", code antgroup/cakekv. The layer
    budgets of the same paper are the allocator ``preference``.

    Attributes:
        gamma: weight of the variance.
        official_order: while decoding, pool over neighbours in the order of the published code's cache after an
            eviction (by score, highest first, then the window) instead of neighbours in the text.
    """

    kernel: int = 5
    pooling: Literal["max", "avg"] = "avg"
    gamma: float = 200.0
    official_order: bool = False
    default_allocator: ClassVar[str] = "preference"

    def __post_init__(self) -> None:
        """Refuse values out of range, and ``official_order`` where each query head would have its own order."""
        super().__post_init__()
        require(self, "official_order", not (self.official_order and self.pool_then_reduce), "no pool_then_reduce")

    @classmethod
    def wrapped(cls, by_head: bool) -> Mapping[str, tuple[Any, str]]:
        """Return that its own order of tokens is none under a wrapper."""
        return {"official_order": (False, "official_order is that of cake's own scores, not of {wrapper}'s")}

    def raw(self, seen: Observation) -> Tensor:
        """Return the indicator; while decoding, the attention of the newest query alone, as officially."""
        if seen.decoding:
            return seen.newest()
        mean, variance = seen.rows(self.window).moments
        return mean + self.gamma * variance

    def note(self, seen: Observation, records: Records, statistic: Statistic = attention) -> None:
        """Under ``official_order`` keep the score, and where each token then lies in the published code's cache."""
        if not self.official_order:
            return
        score = self.reduce(seen, self.raw(seen))
        before = records.get("place", torch.zeros_like(score))  # tokens that came since have 0
        place = before if seen.decoding else torch.zeros_like(score)
        place = place.masked_fill(~seen.key_valid, float("inf"))
        inside = seen.key_valid & (seen.age >= self.window)
        score = pooled(score, inside, self.kernel, self.pooling, sorted_slots(place, seen.order))
        ranking = sorted_slots(score.masked_fill(~inside, float("-inf")), seen.order, descending=True)
        after = ranking.argsort(dim=-1).float() - ranking.shape[-1]
        records["score"], records["place"] = score, torch.where(seen.evicts[..., None], after, before)

    def score(self, seen: Observation) -> Tensor:
        """Return the indicator, pooled along the tokens before the window in the order of the text or of the code."""
        return self.recorded(seen)["score"] if self.official_order else super().score(seen)
