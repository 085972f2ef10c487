"""The same budget in every layer and head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ag.engine.allocators.base import Candidates, LayerAllocator


@dataclass(frozen=True, kw_only=True)
class Uniform(LayerAllocator):
    """Every head of every layer keeps the budget."""

    def layer_budget(self, candidates: Candidates, layer_number: int, layers: int) -> Tensor:
        """Return the budget."""
        return candidates.capacity
