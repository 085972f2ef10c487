"""Gaps closed in a few PyTorch operations on all rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reference_row_close(
    columns: Sequence[Tensor], keep: Tensor, starts: Tensor, lengths: Tensor, *, to_end: bool | None = None
) -> bool:
    """Do what :func:`ag.kernels.row_close.row_close` does."""
    offset = torch.arange(keep.shape[1], dtype=torch.int32, device=keep.device)
    keep = keep & (offset < lengths[:, None])
    kept = keep.cumsum(1, dtype=torch.int32)
    down = kept - 1 - offset  # by how many slots a kept token moves: by as many as went before it
    up = (lengths[:, None] - kept[:, -1:]).int()  # and so many more where the row ends as it ended
    if to_end is None:
        to_end = _moving(keep, down + up) < _moving(keep, down)
    shift = down.add_(up) if to_end else down
    rows, places = (keep & (shift != 0)).nonzero(as_tuple=True)
    source = starts[rows] + places
    target = source + shift[rows, places]
    for x in columns:
        x.index_copy_(0, target, x.index_select(0, source))
    return to_end


def _moving(keep: Tensor, shift: Tensor) -> int:
    return int((keep & (shift != 0)).sum())
