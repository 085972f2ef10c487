"""The product in C++: each thread reads a part of the weight's rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`ag.kernels.linear.linear` on the CPU.

    The order of a token's sums does not depend on the number of threads. With AMX, in bfloat16, it depends on whether
    there are three tokens or more.
    """
    out = torch.empty(*x.shape[:-1], len(weight), dtype=x.dtype)
    sizes = x.numel() // x.shape[-1], *weight.shape, torch.get_num_threads()
    KERNEL(native.TYPES[weight.dtype], x.contiguous(), weight, bias, *sizes, out)
    return out
