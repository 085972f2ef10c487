"""Decoding over rows in pages in C++: as fast as memory can be read."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native

KERNEL = native.Kernel(
    Path(__file__).with_name("cpu.cpp"),
    (ctypes.c_int, *[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 7, ctypes.c_int, *[ctypes.c_void_p] * 2),
)
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scaling: float,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute :func:`ag.kernels.paged_decode.paged_decode` on the CPU in one pass over what is held."""
    batch, heads, _, dim = q.shape
    rows, most = table.shape
    page, width = values.shape[1:]
    query = q.float().contiguous() * scaling
    lengths = lengths.contiguous()
    out = torch.empty(batch, heads, 1, width)
    KERNEL(
        TYPES[keys.dtype],
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        table.data_ptr(),
        lengths.data_ptr(),
        *(rows, batch * heads // rows, dim, width, table.stride(0), most * page, page),
        torch.get_num_threads(),
        out.data_ptr(),
        None if weights is None else weights.data_ptr(),
    )
    return out.to(q.dtype)


def unavailable(keys: Tensor, values: Tensor) -> str | None:
    """Return why the C++ version cannot run on such keys and values, or None."""
    if keys.dtype not in TYPES or values.dtype != keys.dtype:
        return f"keys of {keys.dtype} and values of {values.dtype} are not both float32, bfloat16 or float16"
    return KERNEL.unavailable(keys, values, in_place=True)
