"""The product in C++: each thread reads a part of the weight's rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`ag.kernels.gemv.gemv` on the CPU; threads do not change the order of the float32 sums."""
    out = torch.empty(*x.shape[:-1], len(weight), dtype=x.dtype)
    KERNEL(native.TYPES[weight.dtype], x.contiguous(), weight, bias, *weight.shape, torch.get_num_threads(), out)
    return out
