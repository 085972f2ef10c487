"""Appending in C++: one copy of each token."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.pages import Pages

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def kv_append(pages: Pages, k: Tensor, v: Tensor, token_indices: Tensor, gate: Tensor | None = None) -> None:
    """Do what :func:`ag.kernels.kv_append.kv_append` does, on the CPU."""
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    column = pages.gate
    strides = (ctypes.c_int64 * 6)(*(step * x.element_size() for x in (k, v) for step in x.stride()[:3]))
    gate_values: Tensor | None = None
    if column is not None:
        if gate is None:
            gate_values = column.new_full(k.shape[:3], pages.ungated_value)
        else:
            gate_values = gate.to(column.dtype).contiguous()
    KERNEL(
        *(pages.native, column, 0 if column is None else column.element_size(), k, v, strides),
        *(gate_values, token_indices.contiguous(), k.shape[1], k.shape[2], torch.get_num_threads()),
    )
