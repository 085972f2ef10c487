"""Sums of row statistics in C++: one pass over a tile of logits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.row_statistics.reference import KINDS, Kind
from ag.kernels.row_statistics.values import Values

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def row_statistics(
    kind: Kind, logits: Tensor, counted: Tensor, values: Values | None = None, outputs: Tensor | None = None
) -> Tensor:
    """Compute :func:`ag.kernels.row_statistics.row_statistics` on the CPU in one pass."""
    batch, heads, rows, keys = logits.shape
    kv_heads, dim, strides = heads, 0, (0, 0)
    norms = spread = along = dots = centre = centred = None
    if values is not None and kind != "attention":
        norms, kv_heads = values.norms, values.norms.shape[1]
    if values is not None and kind in ("key", "joint"):
        centre, spread, along, centred, dim = (
            values.centre, values.spread, values.along, values.centred, values.centred.shape[-1]
        )  # fmt: skip
        if centred.stride()[2:] != (dim, 1):
            centred = centred.contiguous()
        strides = centred.stride(0), centred.stride(1)
        if outputs is None:
            a = logits.softmax(-1).nan_to_num()  # a row may see nothing
            outputs = (a.view(batch, kv_heads, -1, keys) @ centred).view(batch, heads, rows, dim)
        dots = outputs.reshape(batch, kv_heads, -1, dim) @ centred.mT
    tensors = (logits, counted, norms, spread, along, dots, None if dots is None else outputs, centre)
    parts = [None if x is None else x.contiguous() for x in tensors]
    out = torch.empty(batch, heads, keys)
    KERNEL(
        KINDS.index(kind),
        *(*parts, centred),
        *(batch, heads, kv_heads, rows, keys, dim, *strides, torch.get_num_threads()),
        out,
    )
    return out


def unavailable(logits: Tensor) -> str | None:
    """Return why the C++ version cannot run on such logits, or None."""
    if logits.dtype != torch.float32:
        return f"{logits.dtype} is not float32"
    return KERNEL.unavailable(logits)
