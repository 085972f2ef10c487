"""Gaps closed in C++: runs of kept tokens are moved as bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from torch.autograd.graph import increment_version

from ag.kernels import native

COLUMNS = 4
KERNEL = native.Kernel(
    Path(__file__).with_name("cpu.cpp"),
    (*[ctypes.c_void_p] * (COLUMNS + 3), *[ctypes.c_int64] * (COLUMNS + 2), ctypes.POINTER(ctypes.c_int64)),
)


def row_close(
    columns: Sequence[Tensor], keep: Tensor, starts: Tensor, lengths: Tensor, *, to_end: bool | None = None
) -> bool:
    """Do what :func:`ag.kernels.row_close.row_close` does, on the CPU."""
    side = ctypes.c_int64(-1 if to_end is None else int(to_end))
    missing = COLUMNS - len(columns)
    rows = [x.contiguous() for x in (starts, lengths, keep)]  # named, so that they outlive the call
    KERNEL(
        *(x.data_ptr() for x in columns),
        *[None] * missing,
        *(x.data_ptr() for x in rows),
        *(x.stride(0) * x.element_size() for x in columns),
        *[0] * missing,
        *keep.shape,
        ctypes.byref(side),
    )
    increment_version(columns)  # autograd does not see the call
    return bool(side.value)


def unavailable(*buffers: Tensor) -> str | None:
    """Return why the C++ version cannot work in such buffers, or None."""
    return KERNEL.unavailable(*buffers, in_place=True)
