"""The worst token of each row in C++: one pass over the scores."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.row_worst.reference import Worst

KERNEL = native.Kernel(
    Path(__file__).with_name("cpu.cpp"), (*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 3)
)


def row_worst(score: Tensor, protected: Tensor, valid: Tensor, ranks: Tensor | None = None) -> Worst:
    """Do what :func:`ag.kernels.row_worst.row_worst` does, on the CPU."""
    rows = [x.contiguous() for x in (score, protected, valid)]  # named, so that they outlive the call
    order = None if ranks is None else ranks.int().contiguous()
    number = score.shape[:-1]
    counts = torch.empty(2, *number, dtype=torch.long)
    finite, slot = torch.empty(number, dtype=torch.bool), torch.empty(number, dtype=torch.int32)
    given = (*(x.data_ptr() for x in rows), None if order is None else order.data_ptr())
    KERNEL(*given, finite.numel(), score.shape[-1], *(x.data_ptr() for x in (counts, finite, slot)))
    held, fixed = counts
    return Worst(held, fixed, finite, slot)


def unavailable(score: Tensor) -> str | None:
    """Return why the C++ version cannot work on a score, or None."""
    if score.dtype != torch.float32:
        return f"a score of {score.dtype} is not float32"
    return KERNEL.unavailable(score)
