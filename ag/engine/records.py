"""What a scorer records of a layer: tensors ``[..., N]`` by name, which follow their tokens from slot to slot."""

from __future__ import annotations

import torch
from torch import Tensor

Records = dict[str, Tensor]


def accumulate(records: Records, name: str, new: Tensor) -> None:
    """Add ``[..., N]`` to what is recorded under a name, in place, so that it keeps its memory from step to step."""
    if name in records:
        records[name].add_(new)
    else:
        records[name] = new.clone()  # others may remember the new one


def latest(records: Records, name: str, new: Tensor, counted: Tensor, last: int) -> None:
    """Record rows ``[B, H, w, N]`` after those recorded before, and keep the last ones.

    Args:
        records: what was recorded.
        name: what they are recorded under.
        new: rows, 0 where nothing counts.
        counted: ``[B, w]`` bool, the rows that exist, which are a sequence's last ones.
        last: rows to keep of each sequence.
    """
    if name in records:
        before = records[name].shape[2]
        new = torch.cat([records[name], new], 2)
        # a sequence with fewer new rows than others keeps more of the earlier ones, right before the new ones
        missing = (~counted).sum(1, keepdim=True)
        columns = torch.arange(new.shape[2], device=new.device)
        order = torch.where(columns < before + missing, (columns - missing) % (before + missing), columns)
        new = new.gather(2, order[:, None, :, None].expand_as(new))
    records[name] = new[:, :, -last:]
