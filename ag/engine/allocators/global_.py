"""One top-k over the heads of all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ag.engine.allocators.base import Allocator, Candidates, LayerBudgets, over_heads
from ag.errors import require


@dataclass(frozen=True, kw_only=True)
class Global(Allocator):
    """One top-k over layers, heads and tokens. It needs scores that are comparable between layers.

    Prefill decides layer by layer, and evicts at once the tokens that are not among the best so far: at most the budget
    and one whole layer are cached. While decoding each layer keeps the total that it had at the end of the prompt,
    shared among its heads by one top-k.

    Source: Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", without a floor;
    the floor is taken from ngocbh/trimkv.

    Attributes:
        floor: share of the budget that every head of every layer keeps at least.
    """

    floor: float = 0.0
    compares_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self, "floor", 0 <= self.floor <= 1, "a share from 0 to 1")

    def keep(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> dict[int, Tensor]:
        """Return the masks of the layer and of earlier layers that lose tokens.

        One decision at the end would keep equal tokens: a token that is not among the best so far is not among the best
        of all.
        """
        budgets.open[layer] = budgets.votes[layer] = candidates
        ahead = sum(budgets.kv_heads[x] for x in budgets.layers if x not in budgets.open)
        total = sum((x.capacity * x.score.shape[1] for x in budgets.votes.values()), candidates.capacity * ahead)
        num_held = sum(x.valid.flatten(1).sum(1) for x in budgets.open.values())
        if ahead and bool((num_held <= total).all()):  # the first layers fit into the budget of all
            budgets.open[layer] = budgets.votes[layer] = candidates.after(candidates.valid)
            return {layer: candidates.valid}
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
        """Return the mask of the layer; each call shares the layer's total among its heads anew."""
        (keep,) = over_heads([candidates], self.floor, budgets.settled[layer])
        return candidates.as_many(keep)
