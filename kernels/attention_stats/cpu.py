"""Statistics of attention in C++: one product for each pair."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.attention_stats.reference import STATISTICS, Kind
from ag.kernels.softmax import PLAIN, Softmax

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def attention_stats(
    kind: Kind,
    q: Tensor,
    k: Tensor,
    query_indices: Tensor,
    key_indices: Tensor,
    scaling: float,
    window: int | None = None,
    skip: int = 0,
    factors: Tensor | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Do what :func:`ag.kernels.attention_stats.attention_stats` does, on the CPU."""
    (batch, heads, count, dim), (_, kv_heads, length, _) = q.shape, k.shape
    out = torch.empty(batch, heads, length, dtype=torch.float32)
    KERNEL(
        *(STATISTICS.index(kind), q.float().contiguous() * scaling, k.float().contiguous()),
        *(query_indices.int().contiguous(), key_indices.int().contiguous(), key_indices.shape[1]),
        None if factors is None else factors.float().contiguous(),
        *(batch, heads, kv_heads, count, length, dim, window or 0, skip, torch.get_num_threads()),
        *(None if softmax.cap is None else torch.tensor([softmax.cap], dtype=torch.float32),),
        *(None if softmax.sinks is None else softmax.sinks.float().contiguous(), out),
    )
    return out
