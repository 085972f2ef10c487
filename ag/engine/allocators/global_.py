"""One top-k over the heads of all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ag.engine.allocators.base import Allocator, Candidates, LayerBudgets, topk_over_heads
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
        budgets.pending[layer] = budgets.pending_by_first[layer] = candidates
        ahead = sum(budgets.kv_heads[x] for x in budgets.layers if x not in budgets.pending)
        total = sum(
            (x.capacity * x.score.shape[1] for x in budgets.pending_by_first.values()), candidates.capacity * ahead
        )
        num_held = sum(x.valid.flatten(1).sum(1) for x in budgets.pending.values())
        if ahead and bool((num_held <= total).all()):  # the first layers fit into the budget of all
            budgets.pending[layer] = budgets.pending_by_first[layer] = candidates.compacted(candidates.valid)
            return {layer: candidates.valid}
        best, masks = topk_over_heads([*budgets.pending_by_first.values()], self.floor, total), {}
        for other, chosen in zip([*budgets.pending], best, strict=True):
            part, by_first = budgets.pending[other], budgets.pending_by_first[other]
            kept = part.keep_same_counts(chosen)
            if not ahead:
                budgets.set_prompt_budget(other, part, kept.sum((1, 2)), mean=part.capacity * kept.shape[1])
            if other == layer or bool((part.valid & ~kept).any()):
                masks[other] = kept
                budgets.pending[other] = left = part.compacted(kept)
                budgets.pending_by_first[other] = left if part.second is None else by_first.compacted(chosen)
        if not ahead:
            budgets.pending.clear()
            budgets.pending_by_first.clear()
        return masks

    def keep_in_decode(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> Tensor:
        """Return the mask of the layer; each call shares the layer's total among its heads anew."""
        (keep,) = topk_over_heads([candidates], self.floor, budgets.layer_budget[layer].to(candidates.score.device))
        return candidates.keep_same_counts(keep)
