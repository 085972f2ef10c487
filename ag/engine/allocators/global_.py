"""One top-k over the heads of all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ag.engine.allocators.base import Allocator, Candidates, LayerBudgets, over_heads
from ag.errors import require


@dataclass(frozen=True, kw_only=True)
class Global(Allocator):
    """One top-k over layers, heads and tokens, so that scores must mean the same everywhere.

    While the prompt is read layers come one after the other; tokens that are not among the best so far are evicted at
    once, so that at most the budget and one whole layer are held. While decoding each layer keeps the total that it had
    at the end of the prompt, shared among its heads by one top-k.

    Source: Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", without a floor;
    the floor is that of ngocbh/trimkv.

    Attributes:
        floor: share of the budget that every head of every layer keeps at least.
    """

    floor: float = 0.0
    compares_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self, "floor", 0 <= self.floor <= 1, "a share from 0 to 1")

    def keep(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> dict[int, Tensor]:
        """Return what stays of the layer and of those before it.

        The result is that of one decision at the end: what is not among the best so far is not among the best of all.
        """
        budgets.open[layer] = budgets.votes[layer] = candidates
        ahead = sum(budgets.kv_heads[x] for x in budgets.layers if x not in budgets.open)
        total = sum((x.capacity * x.score.shape[1] for x in budgets.votes.values()), candidates.capacity * ahead)
        best, masks = over_heads([*budgets.votes.values()], self.floor, total), {}
        for other, chosen in zip([*budgets.open], best, strict=True):
            part, vote = budgets.open[other], budgets.votes[other]
            kept = part.as_many(chosen)
            if not ahead:
                budgets.settle(other, part, kept.sum((1, 2)), mean=part.capacity * kept.shape[1])
            if other == layer or bool((part.valid & ~kept).any()):
                masks[other] = kept
                budgets.open[other] = left = part.after(kept)
                budgets.votes[other] = left if part.second is None else vote.after(chosen)
        if not ahead:
            budgets.open.clear()
            budgets.votes.clear()
        return masks

    def keep_later(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> Tensor:
        """Return what stays of the layer: how its total is shared among heads is decided anew each time."""
        (keep,) = over_heads([candidates], self.floor, budgets.settled[layer])
        return candidates.as_many(keep)
