"""Appending by PyTorch's index operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.pages import Pages, coded


def kv_append(pages: Pages, k: Tensor, v: Tensor, token_indices: Tensor, gate: Tensor | None = None) -> None:
    """Do what :func:`ag.kernels.kv_append.kv_append` does; on a GPU the host waits for the number of tokens."""
    page, heads = pages.keys.shape[1], k.shape[1]
    token_index = token_indices.repeat_interleave(heads, 0)  # [R, T]
    valid = token_index >= 0
    slots = (pages.lengths.long()[:, None] + valid.cumsum(1) - 1).clamp_min(0)
    chosen = valid.nonzero(as_tuple=True)
    slots = slots[chosen]
    pool_index = pages.block_table.long()[chosen[0], slots // page] * page + slots % page
    if gate is None:
        kind = None if pages.gate is None else pages.gate.dtype
        gate_values = torch.full(token_index.shape, pages.ungated_value, dtype=kind, device=token_index.device)
    else:
        gate_values = gate.flatten(0, 1)
    fresh = [*(x.flatten(0, 1) for x in coded(pages, k, v)), token_index, gate_values]
    for column, x in zip(pages.columns, fresh, strict=False):
        column.view(-1, *column.shape[2:]).index_copy_(0, pool_index, x[chosen].to(column.dtype))
    pages.lengths.add_(valid.sum(1).to(pages.lengths.dtype))
