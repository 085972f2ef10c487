"""Tokens packed in C++: runs of those that stay are copied as bytes."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from ag.kernels import native

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"), (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 5))


def row_pack(x: Tensor, keep: Tensor, longest: int) -> Tensor:
    """Do what :func:`ag.kernels.row_pack.row_pack` does, on the CPU."""
    x, keep = x.contiguous(), keep.contiguous()
    rows, out = keep.shape[:-1].numel(), x.new_empty(*x.shape[:-1], longest)
    repeats = x.shape[:-1].numel() // rows
    KERNEL(x.data_ptr(), keep.data_ptr(), out.data_ptr(), x.element_size(), rows, repeats, keep.shape[-1], longest)
    return out


def unavailable(x: Tensor) -> str | None:
    """Return why the C++ version cannot work on a tensor, or None."""
    return KERNEL.unavailable(x)
