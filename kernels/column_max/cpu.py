"""Column maxima in C++: each query meets each key once."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def column_max(
    q: Tensor,
    k: Tensor,
    scaling: float,
    queries: Tensor,
    key_valid: Tensor | None = None,
    window: int | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """Do what :func:`ag.kernels.column_max.column_max` does, on the CPU."""
    (batch, heads, count, dim), (_, kv_heads, length, _) = q.shape, k.shape
    out = torch.empty(batch, heads, length)
    factors = None if factors is None else factors.float().contiguous()
    KERNEL(
        *(q.float().contiguous() * scaling, k.float().contiguous(), queries.contiguous()),
        *(None if key_valid is None else key_valid.contiguous(), factors),
        *(batch, heads, kv_heads, count, length, dim, window or 0, torch.get_num_threads()),
        out,
    )
    return out.exp_()


def unavailable(q: Tensor) -> str | None:
    """Return why the C++ version cannot run on such queries, or None."""
    if q.dtype == torch.float64:
        return f"{q.dtype} is more than float32"
    return KERNEL.unavailable(q)
