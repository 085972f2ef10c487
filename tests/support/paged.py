"""Rows in pages, made from lists of tokens, and read back."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ag.kernels.codes import Format
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
    """Rows of ``lengths`` tokens with ``spare`` more pages each; free slots hold NaN, so that reading one shows."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // page) + spare for length in lengths]
    total = sum(needed) + 2
    numbers = torch.randperm(total, generator=generator) if scattered else torch.arange(total)
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    at = 0
    for row, count in enumerate(needed):
        table[row, :count] = numbers[at : at + count].int()
        at += count
    return Pages(
        torch.full((total, page, dim), float("nan"), dtype=dtype),
        torch.full((total, page, width or dim), float("nan"), dtype=dtype),
        torch.full((total, page), -7, dtype=torch.int32),
        None if gate is None else torch.zeros(total, page, dtype=gate),
        table,
        torch.tensor(lengths, dtype=torch.int32),
    )


def places(pages: Pages, row: int) -> Tensor:
    """The places in the flat pool of a row's tokens, slot by slot."""
    slots, page = torch.arange(int(pages.lengths[row])), pages.keys.shape[1]
    at: Tensor = pages.block_table[row, slots // page].long() * page + slots % page
    return at


def read(pages: Pages, column: Tensor, row: int) -> Tensor:
    """The numbers of a row in a column, slot by slot."""
    return column.flatten(0, 1)[places(pages, row)]


def filled(lengths: Sequence[int], heads: int, batch: int = 1, seed: int = 0, **options: Any) -> tuple[Tensor, Pages]:
    """Queries ``[B, H, 1, D]``, and rows of random tokens as :func:`pages_of` lays them out."""
    pages = pages_of(lengths, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed + sum(lengths))
    for row, length in enumerate(lengths):
        for x in (pages.keys, pages.values):
            x.flatten(0, 1)[places(pages, row)] = torch.randn(length, x.shape[2], generator=generator).to(x.dtype)
    q = torch.randn(batch, heads, 1, pages.keys.shape[2], generator=generator) * 3
    return q.to(pages.keys.dtype), pages


def coded(pages: Pages) -> Pages:
    """The same rows in codes of 8 bits."""
    made = Format.of("int8", pages.keys, pages.values)
    assert made is not None
    keys, values = (x.nan_to_num() for x in (pages.keys, pages.values))
    return pages._replace(keys=made.keys.encode(keys), values=made.values.encode(values), format=made)


def in_pages(keys: Tensor, values: Tensor) -> Pages:
    """Rows of these tokens ``[R, n, D]`` and ``[R, n, Dv]``, ranked as they come."""
    (rows, length, dim), width = keys.shape, values.shape[2]
    pages = pages_of([length] * rows, dim=dim, width=width, dtype=keys.dtype)
    for row in range(rows):
        for column, x in zip(pages.columns, (keys[row], values[row], torch.arange(length).int()), strict=True):
            column.flatten(0, 1)[places(pages, row)] = x
    return pages


def check_threads_and_pages(run: Callable[[Pages], Tensor], pages: Pages) -> None:
    """Assert that a result depends neither on the number of threads nor on where pages lie."""
    before, outputs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs.append(run(pages))
    finally:
        torch.set_num_threads(before)
    order = pages.block_table.flatten().unique().long()
    back = torch.zeros(len(pages.keys), dtype=torch.int32)
    back[order] = torch.arange(len(order), dtype=torch.int32)
    gate = None if pages.gate is None else pages.gate[order]
    moved = pages._replace(
        keys=pages.keys[order], values=pages.values[order], token_indices=pages.token_indices[order], gate=gate
    )
    outputs.append(run(moved._replace(block_table=back[pages.block_table.long()])))
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])
