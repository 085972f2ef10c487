"""Rows of tokens in the pages of a pool: the argument of the kernels."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ag.kernels.codes import Format
from ag.kernels.native import TYPES

WIDEST = 1024  # largest size of a key or value, in numbers or bytes, that a Triton program copies


class Facts(NamedTuple):
    """The properties of rows that decide which version of an operation runs."""

    device: str  # type of the device
    dtypes: tuple[torch.dtype, torch.dtype]  # types of the numbers of keys and of values
    channels: tuple[int, int]  # size of a key and of a value
    stored: int  # numbers, or bytes of codes, of a token's key or value, whichever has more
    coded: bool  # whether keys and values are codes
    gaps: str | None  # why C++ cannot walk the columns, or None


class _Pages(NamedTuple):
    """The columns of a pool of P pages, and R = B Hkv rows that lie in it.

    Row ``b * Hkv + h`` is KV head h of sequence b. Slot t of row r lies in block ``block_table[r, t // page]``, at
    offset ``t % page``; its first ``lengths[r]`` slots hold tokens, in any order.
    """

    keys: Tensor  # [P, page, D], or the bytes [P, page, n] of codes, like the next
    values: Tensor  # [P, page, Dv]
    token_indices: Tensor  # [P, page] int32, the index of each token in its sequence, padding not counted
    gate: Tensor | None  # [P, page], the gate output of each token; None means that the model has no gate
    block_table: Tensor  # [R, W] int32; entries after a row's last block are undefined
    lengths: Tensor  # [R] int32
    format: Format | None = None  # format of the codes. None: keys and values are not quantised


class Pages(_Pages):
    """Rows in pages, with derived values that are computed once and read at each step."""

    @cached_property
    def columns(self) -> list[Tensor]:
        """The columns of the pool."""
        return [self.keys, self.values, self.token_indices, *([] if self.gate is None else [self.gate])]

    @cached_property
    def ungated_value(self) -> float:
        """The gate output of a token in a layer whose gate did not run: a set flag, or the largest number."""
        return 1 if self.gate is None or self.gate.dtype == torch.bool else torch.finfo(self.gate.dtype).max

    @cached_property
    def channels(self) -> tuple[int, int]:
        """Numbers of a key and of a value, D and Dv."""
        if self.format is None:
            return self.keys.shape[2], self.values.shape[2]
        return self.format.keys.width, self.format.values.width

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Types of the numbers of keys and of values."""
        if self.format is None:
            return self.keys.dtype, self.values.dtype
        return self.format.keys.dtype, self.format.values.dtype

    @cached_property
    def native(self) -> ctypes.Array[ctypes.c_int64]:
        """The fields of ``struct Pages`` in ``pages.h``: numbers of 8 bytes, some of them addresses."""
        numbers: list[int] = []
        for column, width, dtype in zip((self.keys, self.values), self.channels, self.dtypes, strict=True):
            numbers += column.data_ptr(), width, TYPES.get(dtype, -1), self.format is not None
            numbers.append(column.stride(1) * column.element_size())
        numbers += self.token_indices.data_ptr(), self.block_table.data_ptr(), self.lengths.data_ptr()
        numbers += len(self.block_table), self.block_table.stride(0), self.keys.shape[1]
        return (ctypes.c_int64 * len(numbers))(*numbers)

    @cached_property
    def facts(self) -> Facts:
        """The properties that decide which version of an operation runs."""
        contiguous = all(x.is_contiguous() for x in (*self.columns, self.block_table, self.lengths))
        return Facts(
            device=self.keys.device.type,
            dtypes=self.dtypes,
            channels=self.channels,
            stored=max(self.keys.shape[2], self.values.shape[2]),
            coded=self.format is not None,
            gaps=None if contiguous else "a column is not contiguous",
        )


def gathered(table: Tensor, lengths: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Return the places of the rows' slots in a flat column, ``[R, most page]``, and which slots hold a token."""
    slots = torch.arange(table.shape[1] * page, device=table.device)
    valid = slots < lengths[:, None]
    return (table.long()[:, slots // page] * page + slots % page).masked_fill(~valid, 0), valid


def read(pages: Pages, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys ``[R, N, D]`` and values ``[R, N, Dv]`` of the rows' tokens at places ``[R, N]`` of the pool."""
    return decoded(pages, *(x.flatten(0, 1)[index] for x in (pages.keys, pages.values)))


def decoded(pages: Pages, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of keys and values ``[R, N, ...]`` that were read from columns."""
    if pages.format is None:
        return keys, values
    return pages.format.keys.decode(keys), pages.format.values.decode(values)


def coded(pages: Pages, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys ``[..., D]`` and values ``[..., Dv]`` as the columns store them."""
    if pages.format is None:
        return keys, values
    return pages.format.keys.encode(keys), pages.format.values.encode(values)
