"""Gaps closed in a few PyTorch operations on all rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reference_row_close(
    columns: Sequence[Tensor], keep: Tensor, starts: Tensor, lengths: Tensor, *, to_end: bool | None = None
) -> bool:
    """Do what :func:`ag.kernels.row_close.row_close` does."""
    offset = torch.arange(keep.shape[1], device=keep.device)
    keep = keep & (offset < lengths[:, None])
    index = starts[:, None] + offset
    place = starts[:, None] + keep.cumsum(1) - 1
    later = place + (lengths - keep.sum(1))[:, None]  # so that a row ends where it ended
    down, up = keep & (place != index), keep & (later != index)
    if to_end is None:
        to_end = int(up.sum()) < int(down.sum())
    moving, target = (up, later) if to_end else (down, place)
    source, target = index[moving], target[moving]
    for x in columns:
        x.index_copy_(0, target, x.index_select(0, source))
    return to_end
