"""The product in C++: each thread reads a part of the weight's rows."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native

KERNEL = native.Kernel(
    Path(__file__).with_name("cpu.cpp"),
    (ctypes.c_int, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2, ctypes.c_int, ctypes.c_void_p),
)
TYPES = {torch.float32: 0, torch.bfloat16: 1}


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`ag.kernels.gemv.gemv` on the CPU; sums are float32, in an order that threads do not change."""
    out = torch.empty(*x.shape[:-1], len(weight), dtype=x.dtype)
    x = x.contiguous()
    KERNEL(
        TYPES[weight.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        *weight.shape,
        torch.get_num_threads(),
        out.data_ptr(),
    )
    return out


def unavailable(x: Tensor, weight: Tensor) -> str | None:
    """Return why the C++ version cannot run on such states and weight, or None."""
    if weight.dtype not in TYPES or x.dtype != weight.dtype:
        return f"states of {x.dtype} and a weight of {weight.dtype} are not both float32 or bfloat16"
    if not weight.is_contiguous():
        return "the weight is not contiguous"
    return KERNEL.unavailable(weight)
