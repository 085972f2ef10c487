"""New tokens into pages in C++: a few copies of one token a row."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ag.kernels import native
from ag.kernels.pages import New, Pages, Reach
from ag.kernels.pages import native as native_pages

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def pool_append(
    pages: Pages, new: New | None, victims: Tensor | None, records: Sequence[Tensor], reach: Reach | None = None
) -> None:
    """Do what :func:`ag.kernels.pool_append.pool_append` does, on the CPU."""
    gate, said = pages.gate, None
    fresh: list[Tensor | None] = [None, None, None]  # each is named, so that it lives as long as the call
    if new is not None:
        if gate is not None:
            said = gate.new_ones(len(pages.table)) if new.gate is None else new.gate.contiguous()
        fresh = [x.contiguous() for x in (new.keys, new.values, new.ranks)]
    keys, values, ranks = fresh
    going = None if victims is None else victims.to(torch.int32, copy=True)  # it is sorted there
    recent, window = reach or (None, None)
    KERNEL(
        *(native_pages(pages), gate, 0 if gate is None else gate.element_size(), keys, values, said, ranks),
        *(going, 0 if going is None else going.shape[1], len(records)),
        (ctypes.c_void_p * len(records))(*(x.data_ptr() for x in records)),
        _numbers(*(x.shape[1] for x in records)),
        records[0].shape[2] if records else 0,
        *(1 if ranks is None else len(pages.table) // len(ranks), recent or 0, window or 0),
    )
    increment_version([*pages.columns, pages.lengths, *records])  # autograd does not see the call


@functools.cache
def _numbers(*values: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def unavailable(pages: Pages, *others: Tensor) -> str | None:
    """Return why the C++ version cannot write into rows and buffers, or None."""
    for codes in pages.format or ():
        if codes.dtype not in native.TYPES:
            return f"codes are made of numbers of {codes.dtype}, not of float32, bfloat16 or float16"
    return KERNEL.unavailable(*pages.columns, pages.table, pages.lengths, *others, in_place=True)
