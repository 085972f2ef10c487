"""The worst token of each row in C++: one pass over the scores."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.row_worst.reference import Going, Worst

KERNEL = native.Kernel(
    Path(__file__).with_name("cpu.cpp"),
    (*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_void_p),
)


def row_worst(score: Tensor, protected: Tensor, valid: Tensor, ranks: Tensor | None = None) -> Worst:
    """Do what :func:`ag.kernels.row_worst.row_worst` does, on the CPU."""
    number = score.shape[:-1]
    counts = torch.empty(2, *number, dtype=torch.long)
    finite, slot = torch.empty(number, dtype=torch.bool), torch.empty(number, dtype=torch.int32)
    _search(score, protected, valid, ranks, counts.data_ptr(), finite.data_ptr(), slot.data_ptr(), None, 1, None)
    held, fixed = counts
    return Worst(held, fixed, finite, slot)


def row_going(
    score: Tensor, protected: Tensor, valid: Tensor, ranks: Tensor | None, capacity: Tensor, going: Going
) -> None:
    """Do what :func:`ag.kernels.row_worst.row_going` does, on the CPU."""
    room = capacity.contiguous()
    slots, found = (x.data_ptr() for x in going)
    _search(score, protected, valid, ranks, None, None, slots, room.data_ptr(), score.shape[1], found)


def _search(score: Tensor, protected: Tensor, valid: Tensor, ranks: Tensor | None, *others: int | None) -> None:
    rows = [x.contiguous() for x in (score, protected, valid)]  # named, so that they outlive the call
    order = None if ranks is None else ranks.int().contiguous()
    given = (*(x.data_ptr() for x in rows), None if order is None else order.data_ptr())
    KERNEL(*given, score.shape[:-1].numel(), score.shape[-1], *others)


def unavailable(score: Tensor) -> str | None:
    """Return why the C++ version cannot work on a score, or None."""
    if score.dtype != torch.float32:
        return f"a score of {score.dtype} is not float32"
    return KERNEL.unavailable(score)
