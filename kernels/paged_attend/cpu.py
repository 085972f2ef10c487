"""Attention from several new tokens to rows in pages in C++, which are read where they lie."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.pages import Pages

KERNEL = native.Kernel(
    Path(__file__).with_name("cpu.cpp"),
    (ctypes.c_int, *[ctypes.c_void_p] * 8, *[ctypes.c_int64] * 10, ctypes.c_int, ctypes.c_void_p),
)
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def paged_attend(
    q: Tensor, pages: Pages, ranks: Tensor, scaling: float, window: int | None = None, recent: int | None = None
) -> Tensor:
    """Do what :func:`ag.kernels.paged_attend.paged_attend` does, on the CPU."""
    keys, values, held, gate, table, lengths = pages
    (batch, heads, count, dim), rows = q.shape, len(table)
    page, width = values.shape[1:]
    query = q.float().contiguous() * scaling
    at, lengths = ranks.int().contiguous(), lengths.contiguous()
    out = torch.empty(batch, heads, count, width)
    KERNEL(
        TYPES[keys.dtype],
        *(x.data_ptr() for x in (query, keys, values, held)),
        None if gate is None or recent is None else gate.data_ptr(),
        *(x.data_ptr() for x in (table, lengths, at)),
        *(rows, rows // batch, batch * heads // rows, count, dim, width, table.stride(0), page),
        *(window or 0, recent or 0),
        torch.get_num_threads(),
        out.data_ptr(),
    )
    return out.to(q.dtype)


def unavailable(keys: Tensor, values: Tensor, *others: Tensor) -> str | None:
    """Return why the C++ version cannot run on such columns, or None."""
    if keys.dtype not in TYPES or values.dtype != keys.dtype:
        return f"keys of {keys.dtype} and values of {values.dtype} are not both float32, bfloat16 or float16"
    return KERNEL.unavailable(keys, values, *others, in_place=True)
