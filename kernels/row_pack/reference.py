"""Tokens packed in a few PyTorch operations."""

from __future__ import annotations

from torch import Tensor


def reference_row_pack(x: Tensor, keep: Tensor, longest: int) -> Tensor:
    """Do what :func:`ag.kernels.row_pack.row_pack` does."""
    order = (~keep).int().argsort(dim=-1, stable=True)[..., :longest]  # what stays, then what does not
    held = keep.gather(-1, order)
    order, held = (y.repeat_interleave(x.shape[1] // keep.shape[1], 1) for y in (order, held))
    while order.ndim < x.ndim:
        order, held = order.unsqueeze(2), held.unsqueeze(2)
    shape = *x.shape[:-1], longest
    return x.gather(-1, order.expand(shape)).masked_fill(~held, 0)
