"""Compaction in C++: one pass over a row chooses the evicted tokens and moves kept tokens into their slots."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.pages import Pages

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def kv_compact(
    pages: Pages, score: Tensor, keep_count: Tensor, records: Sequence[Tensor] = (), nonfinite: Tensor | None = None
) -> None:
    """Do what :func:`ag.kernels.kv_compact.kv_compact` does, on the CPU."""
    score = score if score.stride(2) == 1 else score.contiguous()
    gate = pages.gate
    KERNEL(
        *(pages.native, gate, 0 if gate is None else gate.element_size()),
        *(len(pages.block_table) // len(score), torch.get_num_threads()),
        *(len(records), (ctypes.c_void_p * len(records))(*(x.data_ptr() for x in records))),
        (ctypes.c_int64 * (2 * len(records)))(*(n for x in records for n in x.shape[1:])),
        *(score, score.stride(0), 0 if score.shape[1] == 1 else score.stride(1), keep_count, nonfinite),
    )
