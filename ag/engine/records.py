"""A scorer's records of a layer: tensors ``[..., N]`` by name, which follow their tokens from slot to slot."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.errors import UserError

Records = dict[str, Tensor]


def check_record(name: str, record: Tensor, num_sequences: int, kv_heads: int) -> None:
    """Raise a ``UserError`` for a new record that cannot follow its tokens: kernels move float32 by KV head."""
    shape = [*record.shape]
    by_head = len(shape) > 2 and shape[0] == num_sequences and shape[1] % kv_heads == 0
    if not by_head or record.dtype != torch.float32:
        dtype = str(record.dtype).removeprefix("torch.")
        raise UserError(
            f"record {name!r} of a scorer is {dtype} {shape}: expected float32 [B, H, ..., N] or [B, Hkv, ..., N], "
            f"here with B={num_sequences} and Hkv={kv_heads}."
        )


def latest(records: Records, name: str, new: Tensor, counted: Tensor, last: int) -> None:
    """Record rows of new queries after the recorded ones, and keep the ``last`` newest rows of each sequence.

    Args:
        records: of the layer.
        name: name of the record.
        new: rows ``[B, H, w, N]``, 0 for queries that do not exist.
        counted: ``[B, w]`` bool, the queries that exist; padding comes first.
        last: rows to keep.
    """
    if name in records:
        num_old = records[name].shape[2]
        new = torch.cat([records[name], new], 2)
        # a sequence with fewer new rows than others keeps more of the earlier ones: its old rows and the missing ones
        # change places, so that the old rows end right before the new ones
        missing = (~counted).sum(1, keepdim=True)
        columns = torch.arange(new.shape[2], device=new.device)
        order = torch.where(columns < num_old + missing, (columns - missing) % (num_old + missing), columns)
        new = new.gather(2, order[:, None, :, None].expand_as(new))
    records[name] = new[:, :, -last:]


def fit(records: Records, slots: int) -> None:
    """Resize all records to a number of slots; tokens without a record get 0."""
    for name, x in records.items():
        if x.shape[-1] != slots:
            records[name] = x[..., :slots] if x.shape[-1] > slots else F.pad(x, (0, slots - x.shape[-1]))


def concat_records(records: Records, added: Records, num_sequences: int, num_added: int) -> Records:
    """Return the records of ``num_sequences`` sequences and of ``num_added`` more, of equally many slots.

    A record that one side lacks is 0 there.
    """
    result = {}
    for name, record in {**added, **records}.items():
        empty = [record.new_zeros(count, *record.shape[1:]) for count in (num_sequences, num_added)]
        result[name] = torch.cat(equally_many_rows(records.get(name, empty[0]), added.get(name, empty[1])))
    return result


def equally_many_rows(record: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return two records with equally many rows of queries: the shorter one gets zeros before its oldest row."""
    for dim in range(2, record.ndim - 1):
        size = max(record.shape[dim], other.shape[dim])
        record, other = pad_front(record, size, dim), pad_front(other, size, dim)
    return record, other


def pad_front(x: Tensor, size: int, dim: int) -> Tensor:
    """Pad a dimension with zeros in front."""
    return F.pad(x, (*[0] * (2 * (x.ndim - 1 - dim)), size - x.shape[dim], 0))
