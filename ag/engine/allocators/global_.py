"""One top-k over the heads of all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ag.engine.allocators.base import Allocator, Candidates, LayerBudgets
from ag.engine.select import at_least, select
from ag.errors import require


@dataclass(frozen=True, kw_only=True)
class Global(Allocator):
    """One top-k over layers, heads and tokens, so that scores must mean the same everywhere.

    While the prompt is read layers come one after the other; what is not among the best of all so far goes at once, so
    that at most the budget and one whole layer are held. While decoding each layer keeps the total that it had at the
    end of the prompt, shared among its heads by one top-k.

    Source: Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", without a floor;
    with one ngocbh/trimkv.

    Attributes:
        floor: share of the budget that every head of every layer keeps at least.
    """

    floor: float = 0.0
    compares_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self, "floor", 0 <= self.floor <= 1, "a share from 0 to 1")

    def keep(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> dict[int, Tensor]:
        """Return what stays of the layer and of those before it, so that the budget and one whole layer are held.

        The result is that of one decision at the end: what is not among the best so far is not among the best of all.
        """
        budgets.open[layer] = budgets.votes[layer] = candidates
        last, masks = len(budgets.open) == len(budgets.layers), {}
        for other, chosen in self._best(budgets, candidates.due.device).items():
            mine = budgets.open[other]
            keep = mine.as_many(chosen)
            if last:
                budgets.settle(other, mine, keep.sum((1, 2)), mean=mine.capacity * keep.shape[1])
            if other == layer or bool((mine.valid & ~keep).any()):
                masks[other] = keep
                budgets.open[other] = mine.after(keep)
                budgets.votes[other] = (
                    budgets.open[other] if mine.second is None else budgets.votes[other].after(chosen)
                )
        if last:
            budgets.open.clear()
            budgets.votes.clear()
        return masks

    def keep_later(self, layer: int, candidates: Candidates, budgets: LayerBudgets) -> Tensor:
        """Return what stays of the layer: how its total is shared among heads is decided anew each time."""
        return candidates.over_heads(self.floor, budgets.settled[layer])

    def _best(self, budgets: LayerBudgets, device: torch.device) -> dict[int, Tensor]:
        """Return, by layer so far, the best of all of them ``[B, Hkv, N]``: as many as the budget of all layers."""
        votes = budgets.votes.values()
        sure = [
            select(
                *(vote.score, vote.protected, vote.valid),
                *(at_least(vote.capacity, self.floor, vote.protected & vote.valid), vote.order),
            )
            for vote in votes
        ]
        score, always, held = (
            torch.cat([x.flatten(1).to(device) for x in column], 1)[:, None]
            for column in ([vote.score for vote in votes], sure, [vote.valid for vote in votes])
        )
        allowed = [vote.capacity.to(device) * vote.valid.shape[1] for vote in votes]
        total = torch.stack(allowed).sum(0) + (len(budgets.layers) - len(allowed)) * allowed[-1]
        best = select(score, always, held, total[:, None], _order(list(votes), device))[:, 0].split(
            [vote.valid[0].numel() for vote in votes], 1
        )
        return {
            layer: vote.exempting(part.view_as(vote.valid).to(vote.valid.device))
            for (layer, vote), part in zip(budgets.votes.items(), best, strict=True)
        }


def _order(votes: list[Candidates], device: torch.device) -> Tensor | None:
    """Return the slots ``[B, 1, N]`` of all layers in the order of layers, heads and ranks; None means as they lie."""
    if all(vote.ranks is None for vote in votes):
        return None
    parts, first = [], 0
    for vote in votes:
        heads, slots = vote.valid.shape[1:]
        order = (
            torch.arange(slots, device=device).expand_as(vote.valid) if vote.order is None else vote.order.to(device)
        )
        parts.append((order + first + torch.arange(heads, device=device)[:, None] * slots).flatten(1))
        first += heads * slots
    return torch.cat(parts, 1)[:, None]
