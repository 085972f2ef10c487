"""Compaction in C++: one pass over a row chooses the tokens that go and moves those that fill their places."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.kv_compact.reference import Worst
from ag.kernels.pages import Pages

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def kv_compact(pages: Pages, keep: Tensor | Worst, records: Sequence[Tensor] = ()) -> None:
    """Do what :func:`ag.kernels.kv_compact.kv_compact` does, on the CPU."""
    mask: Tensor | None = None
    chosen: list[Tensor | int | None] = [None, None, None, 0, 0, None, None, None, None, None, 0]
    if isinstance(keep, Worst):
        score = keep.score if keep.score.stride(2) == 1 else keep.score.contiguous()
        of_head = 0 if score.shape[1] == 1 else score.stride(1)
        chosen = [keep.stays, None, score, score.stride(0), of_head, keep.sinks, keep.recent_from, keep.expired_to]
        chosen += [keep.found, keep.protected, 0 if keep.protected is None else keep.protected.shape[1]]
    else:
        mask = keep.contiguous()
        chosen[1], chosen[3] = mask, mask.shape[1]
    rows, gate = len(pages.table), pages.gate
    heads = rows // len(keep.sinks) if isinstance(keep, Worst) else 1
    KERNEL(
        *(pages.native, gate, 0 if gate is None else gate.element_size(), heads, torch.get_num_threads()),
        *(len(records), (ctypes.c_void_p * len(records))(*(x.data_ptr() for x in records))),
        (ctypes.c_int64 * (2 * len(records)))(*(n for x in records for n in x.shape[1:])),
        *chosen,
    )
