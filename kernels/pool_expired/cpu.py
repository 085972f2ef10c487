"""What leaves the recent tokens or the window, in C++."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.pages import Pages

KERNEL = native.Kernel(
    Path(__file__).with_name("cpu.cpp"), (*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 6, ctypes.c_void_p)
)


def pool_expired(pages: Pages, ranks: Tensor, recent: int | None, window: int | None) -> Tensor:
    """Do what :func:`ag.kernels.pool_expired.pool_expired` does, on the CPU."""
    table, gate, new = pages.table, pages.gate, ranks.contiguous()  # named, so that they outlive the call
    out = torch.empty(len(table), 2, dtype=torch.int32)
    KERNEL(
        pages.ranks.data_ptr(),
        None if gate is None or recent is None else gate.data_ptr(),
        table.data_ptr(),
        pages.lengths.data_ptr(),
        new.data_ptr(),
        *(len(table), len(table) // len(new), table.shape[1], pages.keys.shape[1], recent or 0, window or 0),
        out.data_ptr(),
    )
    return out


def unavailable(ranks: Tensor) -> str | None:
    """Return why the C++ version cannot read ranks, or None."""
    return KERNEL.unavailable(ranks)
