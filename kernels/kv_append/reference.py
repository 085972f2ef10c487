"""Appending by PyTorch's index operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.pages import Pages, coded


def kv_append(pages: Pages, k: Tensor, v: Tensor, ranks: Tensor, gate: Tensor | None = None) -> None:
    """Do what :func:`ag.kernels.kv_append.kv_append` does; on a GPU the host waits for the number of tokens."""
    page, heads = pages.keys.shape[1], k.shape[1]
    rank = ranks.repeat_interleave(heads, 0)  # [R, T]
    there = rank >= 0
    slots = (pages.lengths.long()[:, None] + there.cumsum(1) - 1).clamp_min(0)
    chosen = there.nonzero(as_tuple=True)
    slots = slots[chosen]
    at = pages.table.long()[chosen[0], slots // page] * page + slots % page
    said = torch.full(rank.shape, pages.unjudged, device=rank.device) if gate is None else gate.flatten(0, 1)
    fresh = [*(x.flatten(0, 1) for x in coded(pages, k, v)), rank, said]
    for column, x in zip(pages.columns, fresh, strict=False):
        column.view(-1, *column.shape[2:]).index_copy_(0, at, x[chosen].to(column.dtype))
    pages.lengths.add_(there.sum(1).to(pages.lengths.dtype))
