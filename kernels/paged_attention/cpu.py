"""Attention to rows in pages in C++."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.pages import Pages
from ag.kernels.softmax import PLAIN, Softmax

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def paged_attention(
    q: Tensor,
    pages: Pages,
    query_indices: Tensor | None,
    scaling: float,
    window: int | None = None,
    recent: int | None = None,
    softmax: Softmax = PLAIN,
    weigh: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Do what :func:`ag.kernels.paged_attention.paged_attention` does, on the CPU."""
    (batch, heads, count, _), (rows, table_width) = q.shape, pages.block_table.shape
    group, slots = batch * heads // rows, table_width * pages.keys.shape[1]
    out = torch.empty(batch, heads, count, pages.channels[1], dtype=torch.float32)
    weights = torch.empty(batch, heads, slots, dtype=torch.float32) if weigh else None
    KERNEL(
        *(pages.native, q.float().contiguous() * scaling, None if recent is None else pages.gate),
        *(None if query_indices is None else query_indices.contiguous(), rows // batch, group, count),
        *(window or 0, recent or 0, slots, torch.get_num_threads()),
        None if softmax.cap is None else torch.tensor([softmax.cap], dtype=torch.float32),
        *(None if softmax.sinks is None else softmax.by_row(rows, group), out, weights),
    )
    return out.to(q.dtype), weights
