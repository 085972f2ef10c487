"""Decoding over rows in pages in C++: as fast as memory can be read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


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
    out = torch.empty(batch, heads, 1, width)
    KERNEL(
        *(native.TYPES[keys.dtype], q.float().contiguous() * scaling, keys, values, table, lengths.contiguous()),
        *(rows, batch * heads // rows, dim, width, table.stride(0), most * page, page, torch.get_num_threads()),
        *(out, weights),
    )
    return out.to(q.dtype)


def unavailable(keys: Tensor, values: Tensor, *others: Tensor, kernel: native.Kernel = KERNEL) -> str | None:
    """Return why a C++ kernel cannot run on such columns of a pool, or None."""
    if keys.dtype not in native.TYPES or values.dtype != keys.dtype:
        return f"keys of {keys.dtype} and values of {values.dtype} are not both float32, bfloat16 or float16"
    return kernel.unavailable(keys, values, *others, in_place=True)
