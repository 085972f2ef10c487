"""Attention from several new tokens to rows in pages in C++, which are read where they lie."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.paged_decode import cpu as paged_decode
from ag.kernels.pages import Pages

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def paged_attend(
    q: Tensor, pages: Pages, ranks: Tensor, scaling: float, window: int | None = None, recent: int | None = None
) -> Tensor:
    """Do what :func:`ag.kernels.paged_attend.paged_attend` does, on the CPU."""
    keys, values, held, gate, table, lengths = pages
    (batch, heads, count, dim), rows = q.shape, len(table)
    page, width = values.shape[1:]
    out = torch.empty(batch, heads, count, width)
    KERNEL(
        *(native.TYPES[keys.dtype], q.float().contiguous() * scaling, keys, values, held),
        *(None if recent is None else gate, table, lengths.contiguous(), ranks.int().contiguous()),
        *(rows, rows // batch, batch * heads // rows, count, dim, width, table.stride(0), page),
        *(window or 0, recent or 0, torch.get_num_threads(), out),
    )
    return out.to(q.dtype)


def unavailable(*columns: Tensor) -> str | None:
    """Return why the C++ version cannot run on such columns, or None."""
    return paged_decode.unavailable(*columns, kernel=KERNEL)
