"""What leaves the recent tokens or the window, in a few PyTorch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.pages import Pages


def reference_pool_expired(pages: Pages, ranks: Tensor, recent: int | None, window: int | None) -> Tensor:
    """Do what :func:`ag.kernels.pool_expired.pool_expired` does."""
    table = pages.table.long()
    slots = torch.arange(table.shape[1] * pages.keys.shape[1], device=table.device)
    there = slots < pages.lengths[:, None]
    held = pages.ranks[table.clamp_min(0)].flatten(1).masked_fill(~there, -1)
    new = ranks.repeat_interleave(len(table) // len(ranks))[:, None]
    found = []
    for distance, closed in ((recent, True), (window, False)):
        goes = there & (held == new - (distance or 0)) & (new >= (distance or 0)) & (distance is not None)
        if closed and pages.gate is not None:
            goes = goes & ~pages.gate[table.clamp_min(0)].flatten(1).bool()
        found.append(torch.where(goes, slots, -1).amax(1))
    first, second = found
    first = first.where(first != second, -1)  # each slot once
    return torch.stack([first, second], 1).int()
