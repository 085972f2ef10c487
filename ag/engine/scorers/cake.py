"""CAKE's indicator: attention that is high, or that varies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ag.engine.observe import Observation, attention
from ag.engine.scorers.base import pooled
from ag.engine.scorers.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class Cake(SnapKV):
    """Mean plus ``gamma`` times the variance of the attention over an observation window, pooled.

    Source: "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences", code antgroup/cakekv. The layer
    budgets of the same paper are the allocator ``preference``.

    Attributes:
        gamma: weight of the variance.
        official_order: while decoding, pool over neighbours in the order of the prompt's scores, highest first, as the
            code does, whose cache is left in that order; else over neighbours in the text.
    """

    kernel: int = 5
    pooling: Literal["max", "avg"] = "avg"
    gamma: float = 200.0
    official_order: bool = False

    def raw(self, seen: Observation) -> Tensor:
        """Return the indicator; while decoding, the attention of the newest query alone, as officially."""
        if seen.decoding:
            return seen.rows(1).total(attention)
        mean, variance = seen.rows(self.window).moments()
        return mean + self.gamma * variance

    def pool(self, seen: Observation, score: Tensor, before_window: bool = True) -> Tensor:
        """Pool along the tokens before the window, in the order of the text or of the prompt's scores."""
        if not self.official_order:
            return super().pool(seen, score, before_window)
        if not seen.decoding:
            result = super().pool(seen, score, before_window)
            if result.shape[1] == seen.k.shape[1]:
                rivals = result.masked_fill(~seen.key_valid | (seen.age < self.window), float("-inf"))
                place = rivals.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
                seen.memory["place"] = place.float() - result.shape[-1]  # below 0, as what comes later has 0
            return result
        heads = score.shape[1] // seen.k.shape[1]
        place = seen.memory["place"].masked_fill(~seen.key_valid, float("inf"))
        order = place.argsort(dim=-1, stable=True).repeat_interleave(heads, 1)
        inside = (seen.key_valid & (seen.age >= self.window)) if before_window else seen.key_valid
        moved = inside.repeat_interleave(heads, 1).gather(-1, order)
        mixed = pooled(score.gather(-1, order), moved, self.kernel, self.pooling)
        return torch.zeros_like(mixed).scatter_(-1, order, mixed)
