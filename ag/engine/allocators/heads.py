"""Ada-KV: the heads of a layer compete for its budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ag.engine.allocators.base import Allocator, Candidates, LayerBudgets, topk_over_heads
from ag.errors import require


@dataclass(frozen=True, kw_only=True)
class Heads(Allocator):
    """Uniform over layers, one top-k over the heads of each, also while decoding.

    Source: Feng et al. 2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
    Inference".

    Attributes:
        floor: share of the budget that every head keeps at least.
    """

    floor: float = 0.2
    compares_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self, "floor", 0 <= self.floor <= 1, "a share from 0 to 1")

    def keep(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> dict[int, Tensor]:
        """Return the mask of the layer."""
        return {layer: self.keep_in_decode(layer, candidates, budgets)}

    def keep_in_decode(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> Tensor:
        """Return the mask of the layer; each call shares the layer's budget among its heads anew."""
        (keep,) = topk_over_heads([candidates], self.floor, candidates.capacity * candidates.score.shape[1])
        return candidates.keep_same_counts(keep)
