"""Gaps closed in C++: runs of kept tokens are moved as bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ag.kernels import native

SOURCE = Path(__file__).with_name("cpu.cpp")
COLUMNS = 4
ARGUMENTS = (*[ctypes.c_void_p] * (COLUMNS + 3), *[ctypes.c_int64] * (COLUMNS + 2), ctypes.POINTER(ctypes.c_int64))


def row_close(
    columns: Sequence[Tensor], keep: Tensor, starts: Tensor, lengths: Tensor, *, to_end: bool | None = None
) -> bool:
    """Do what :func:`ag.kernels.row_close.row_close` does, on the CPU."""
    function = native.function(SOURCE, *ARGUMENTS)
    assert not isinstance(function, str)
    side = ctypes.c_int64(-1 if to_end is None else int(to_end))
    missing = COLUMNS - len(columns)
    rows = [x.contiguous() for x in (starts, lengths, keep)]  # named, so that they outlive the call
    function(
        *(x.data_ptr() for x in columns),
        *[None] * missing,
        *(x.data_ptr() for x in rows),
        *(x.stride(0) * x.element_size() for x in columns),
        *[0] * missing,
        *keep.shape,
        ctypes.byref(side),
    )
    return bool(side.value)


def unavailable(*tensors: Tensor) -> str | None:
    """Return why the C++ version cannot work in such buffers, or None."""
    if tensors[0].device.type != "cpu":
        return f"the tensors are on {tensors[0].device.type}"
    if not all(x.is_contiguous() for x in tensors):
        return "a buffer is not contiguous"
    function = native.function(SOURCE, *ARGUMENTS)
    return function if isinstance(function, str) else None
