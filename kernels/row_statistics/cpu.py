"""Sums of row statistics in C++: one pass over a tile of logits."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.row_statistics.reference import KINDS, Kind

SOURCE = Path(__file__).with_name("cpu.cpp")
ARGUMENTS = (ctypes.c_int, *[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 5, ctypes.c_int, ctypes.c_void_p)


def row_statistics(
    kind: Kind,
    logits: Tensor,
    counted: Tensor,
    value_norms: Tensor | None = None,
    dots: Tensor | None = None,
    output_norms: Tensor | None = None,
) -> Tensor:
    """Compute :func:`ag.kernels.row_statistics.row_statistics` on the CPU in one pass."""
    function = native.function(SOURCE, *ARGUMENTS)
    assert not isinstance(function, str)
    batch, heads, rows, keys = logits.shape
    parts = [None if x is None else x.contiguous() for x in (logits, counted, value_norms, dots, output_norms)]
    out = torch.empty(batch, heads, keys)
    function(
        KINDS.index(kind),
        *(None if x is None else x.data_ptr() for x in parts),
        batch,
        heads,
        heads if value_norms is None else value_norms.shape[1],
        rows,
        keys,
        torch.get_num_threads(),
        out.data_ptr(),
    )
    return out


def unavailable(logits: Tensor) -> str | None:
    """Return why the C++ version cannot run on such logits, or None."""
    if logits.device.type != "cpu":
        return f"the tensors are on {logits.device.type}"
    if logits.dtype != torch.float32:
        return f"{logits.dtype} is not float32"
    function = native.function(SOURCE, *ARGUMENTS)
    return function if isinstance(function, str) else None
