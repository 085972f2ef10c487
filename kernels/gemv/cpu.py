"""The product in C++: each thread reads a part of the weight's rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`ag.kernels.gemv.gemv` on the CPU; sums are float32, in an order that threads do not change."""
    out = torch.empty(*x.shape[:-1], len(weight), dtype=x.dtype)
    KERNEL(native.TYPES[weight.dtype], x.contiguous(), weight, bias, *weight.shape, torch.get_num_threads(), out)
    return out


def unavailable(x: Tensor, weight: Tensor) -> str | None:
    """Return why the C++ version cannot run on such states and weight where it was compiled, or None."""
    if weight.dtype not in (torch.float32, torch.bfloat16) or x.dtype != weight.dtype:
        return f"states of {x.dtype} and a weight of {weight.dtype} are not both float32 or bfloat16"
    if not weight.is_contiguous():
        return "the weight is not contiguous"
    return None if weight.device.type == "cpu" else f"the tensors are on {weight.device.type}"
