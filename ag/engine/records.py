"""A scorer's records of a layer: tensors ``[..., N]`` by name, which follow their tokens from slot to slot."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

Records = dict[str, Tensor]


def latest(records: Records, name: str, new: Tensor, counted: Tensor, last: int) -> None:
    """Record rows ``[B, H, w, N]``, 0 where nothing counts, after earlier ones, and keep the ``last`` of each sequence.

    The rows that exist, ``counted`` ``[B, w]`` bool, are a sequence's last ones.
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


def fit(records: Records, slots: int) -> None:
    """Resize all records to a number of slots; tokens without a record get 0."""
    for name, x in records.items():
        if x.shape[-1] != slots:
            records[name] = x[..., :slots] if x.shape[-1] > slots else F.pad(x, (0, slots - x.shape[-1]))


def joined(mine: Records, others: Records, batch: int, more: int) -> Records:
    """Return the records of ``batch`` sequences and of ``more`` others with as many slots; what one side lacks is 0."""
    found = {}
    for name, known in {**others, **mine}.items():
        empty = [known.new_zeros(count, *known.shape[1:]) for count in (batch, more)]
        parts = [mine.get(name, empty[0]), others.get(name, empty[1])]
        for dim in range(2, known.ndim - 1):  # rows of queries: the last ones are the newest
            parts = [later(x, max(part.shape[dim] for part in parts), dim) for x in parts]
        found[name] = torch.cat(parts)
    return found


def later(x: Tensor, size: int, dim: int) -> Tensor:
    """Pad a dimension with zeros in front."""
    return F.pad(x, (*[0] * (2 * (x.ndim - 1 - dim)), size - x.shape[dim], 0))
