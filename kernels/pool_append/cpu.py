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

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def pool_append(
    pages: Pages, new: New | None, victims: Tensor | None, records: Sequence[Tensor], reach: Reach | None = None
) -> None:
    """Do what :func:`ag.kernels.pool_append.pool_append` does, on the CPU."""
    keys, values, ranks, gate, table, lengths = pages
    rows, pools = len(table), [keys, values] if gate is None else [keys, values, gate]
    fresh: list[Tensor] = []  # whose addresses alone are given
    of_sequence = None
    if new is not None:
        fresh, of_sequence = [new.keys.contiguous(), new.values.contiguous()], new.ranks.contiguous()
        if gate is not None:
            fresh.append(gate.new_ones(rows) if new.gate is None else new.gate.contiguous())
    going = None if victims is None else victims.to(torch.int32, copy=True)  # it is sorted there
    recent, window = reach or (None, None)
    KERNEL(
        len(pools),
        _pointers(*(x.data_ptr() for x in pools)),
        _fresh_pointers(*(x.data_ptr() for x in fresh)),
        _numbers(*(x.element_size() * (x.shape[2] if x.ndim > 2 else 1) for x in pools)),
        *(ranks, table, lengths, of_sequence, going, 0 if going is None else going.shape[1]),
        len(records),
        _fresh_pointers(*(x.data_ptr() for x in records)),
        _numbers(*(x.shape[1] for x in records)),
        records[0].shape[2] if records else 0,
        *(rows, 1 if of_sequence is None else rows // len(of_sequence), table.shape[1], keys.shape[1]),
        *(recent or 0, window or 0),
    )
    increment_version([*pools, ranks, lengths, *records])  # autograd does not see the call


def _fresh_pointers(*places: int) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(places))(*places)


@functools.lru_cache
def _pointers(*places: int) -> ctypes.Array[ctypes.c_void_p]:
    """Return what :func:`_fresh_pointers` does, of tensors that stay where they are for many calls."""
    return _fresh_pointers(*places)


@functools.cache
def _numbers(*values: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def unavailable(*buffers: Tensor) -> str | None:
    """Return why the C++ version cannot write into buffers, or None."""
    return KERNEL.unavailable(*buffers, in_place=True)
