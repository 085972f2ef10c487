"""Rows in pages, made from lists of tokens, and read back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ag.kernels.pages import Pages


def pages_of(
    lengths: Sequence[int],
    page: int = 16,
    spare: int = 1,
    dim: int = 4,
    width: int | None = None,
    dtype: torch.dtype = torch.float32,
    gate: torch.dtype | None = None,
    scattered: bool = True,
    seed: int = 0,
) -> Pages:
    """Rows of so many tokens, each with so many spare pages; free slots hold NaN, so that reading one shows."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // page) + spare for length in lengths]
    total = sum(needed) + 2
    numbers = torch.randperm(total, generator=generator) if scattered else torch.arange(total)
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    at = 0
    for row, count in enumerate(needed):
        table[row, :count] = numbers[at : at + count].int()
        at += count
    width = dim if width is None else width
    return Pages(
        torch.full((total, page, dim), float("nan"), dtype=dtype),
        torch.full((total, page, width), float("nan"), dtype=dtype),
        torch.full((total, page), -7, dtype=torch.int32),
        None if gate is None else torch.zeros(total, page, dtype=gate),
        table,
        torch.tensor(lengths, dtype=torch.int32),
    )


def places(pages: Pages, row: int, count: int | None = None) -> Tensor:
    """The places ``[count]`` in the flat pool of a row's slots."""
    page = pages.keys.shape[1]
    slots = torch.arange(int(pages.lengths[row]) if count is None else count)
    at: Tensor = pages.table[row, slots // page].long() * page + slots % page
    return at


def read(pages: Pages, column: Tensor, row: int) -> Tensor:
    """What a column holds of a row, slot by slot."""
    return column.flatten(0, 1)[places(pages, row)]
