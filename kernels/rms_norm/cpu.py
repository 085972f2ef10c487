"""The norm in C++: one pass over the numbers of a token."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ag.kernels import native

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute :func:`ag.kernels.rms_norm.rms_norm` on the CPU, in bfloat16."""
    x = x.contiguous()
    out = torch.empty_like(x)
    size = len(weight)
    KERNEL(x, weight, _as_array(eps), x.numel() // size, size, torch.get_num_threads(), out)
    return out


@functools.cache
def _as_array(eps: float) -> ctypes.Array[Any]:
    return (ctypes.c_float * 1)(eps)
