"""Rows in pages, made from lists of tokens, and read back."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ag.kernels.codes import GROUP, Codes, Format, KVDtype
from ag.kernels.pages import Pages
from ag.kernels.softmax import PLAIN, Softmax
from tests.support.bounded import Bounded, bounded
from tests.support.bounds import hold


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


def filled(lengths: Sequence[int], heads: int, batch: int = 1, seed: int = 0, **options: Any) -> tuple[Tensor, Pages]:
    """Queries ``[B, H, 1, D]``, and rows of random tokens as :func:`pages_of` lays them out."""
    pages = pages_of(lengths, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed + sum(lengths))
    for row in range(len(lengths)):
        for x in (pages.keys, pages.values):
            tokens = torch.randn(lengths[row], x.shape[2], generator=generator)
            x.flatten(0, 1)[places(pages, row)] = tokens.to(x.dtype)
    q = torch.randn(batch, heads, 1, pages.keys.shape[2], generator=generator) * 3
    return q.to(pages.keys.dtype), pages


def coded(pages: Pages, kind: KVDtype) -> Pages:
    """The same rows in codes, tokens ranked in any order."""
    made = Format.of(kind, pages.keys, pages.values)
    assert made is not None
    ranks, lengths = pages.ranks.clone(), pages.lengths.tolist()
    keys, values = (x.nan_to_num() for x in (pages.keys, pages.values))
    for row, length in enumerate(lengths):
        at = places(pages, row)
        mine = torch.randperm(length, generator=torch.Generator().manual_seed(row)).int()
        ranks.flatten()[at] = mine if not bool((ranks.flatten()[at] >= 0).all()) else ranks.flatten()[at]
    written = made.keys.encode(keys), made.values.encode(values)
    return pages._replace(keys=written[0], values=written[1], ranks=ranks, format=made)


def numbers_of(codes: Codes, data: Tensor) -> Bounded:
    """What bytes ``[n, bytes]`` stand for, ``[n, width]``, channel by channel."""
    table = data.numpy()
    scales = (
        torch.from_numpy(table[:, codes.width :].ravel())
        .view(torch.float16)
        .double()
        .view(len(data), -(-codes.width // GROUP), 2)
    )
    found = torch.from_numpy(table[:, : codes.width].astype("float64"))
    scale, offset = (x.repeat_interleave(GROUP, 1)[:, : codes.width] for x in scales.unbind(2))
    numbers = cast("Bounded", bounded(found) * bounded(scale) + bounded(offset))
    rounded = numbers.exact.abs() * (0 if codes.dtype == torch.float32 else torch.finfo(codes.dtype).eps / 2)
    return Bounded(numbers.exact, numbers.error + rounded, numbers.eps)  # a version may read them in their own type


def tokens(pages: Pages, row: int, dtype: torch.dtype = torch.float32) -> list[Bounded]:
    """The keys and values of a row, slot by slot, as operands of a computation in ``dtype``."""
    held = [read(pages, x, row) for x in (pages.keys, pages.values)]
    if pages.format is None:
        return [bounded(x, dtype) for x in held]
    found = [numbers_of(codes, x) for codes, x in zip((pages.format.keys, pages.format.values), held, strict=True)]
    return [x.at(dtype) for x in found]


def attended(
    q: Tensor, pages: Pages, scaling: float, dtype: torch.dtype = torch.float32, softmax: Softmax = PLAIN
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs ``[G, Dv]`` and weights ``[G, n]`` of each row, in float64, as :mod:`bounded` ones of ``dtype``."""
    outs: list[Tensor] = []
    weights: list[Tensor] = []
    for row, query in enumerate(q.reshape(len(pages.lengths), -1, q.shape[-1])):
        k, v = tokens(pages, row, dtype)
        s = bounded(query, dtype) @ k.T * scaling
        e = (s if softmax.cap is None else (s / softmax.cap).tanh() * softmax.cap).exp()
        beside: Tensor | float = 0.0
        if softmax.sinks is not None:
            heads = torch.arange(len(query)) + row * len(query)
            beside = bounded(softmax.sinks[heads % len(softmax.sinks)], dtype).exp()[:, None]
        a = e / (e.sum(-1, keepdim=True) + beside) if len(k) else e
        weights.append(a)
        outs.append(a @ v)
    return outs, weights


def hold_rows(got: Tensor, want: Sequence[Tensor]) -> None:
    """Hold what a kernel returned for ``[B, H]`` queries to each row's numbers; what lies behind them is 0."""
    for row, (mine, right) in enumerate(zip(got.flatten(0, 1).unflatten(0, (len(want), -1)), want, strict=True)):
        mine = mine.flatten(1)
        hold(mine[:, : right.shape[1]], right, name=row)
        assert not mine[:, right.shape[1] :].any()


def in_pages(keys: Tensor, values: Tensor, **options: Any) -> Pages:
    """Rows of these tokens ``[R, n, D]`` and ``[R, n, Dv]``."""
    (rows, length, dim), width = keys.shape, values.shape[2]
    pages = pages_of([length] * rows, dim=dim, width=width, dtype=keys.dtype, **options)
    for row in range(rows):
        for column, x in zip(pages.columns, (keys, values), strict=False):
            column.flatten(0, 1)[places(pages, row)] = x[row]
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
    order = pages.table.flatten().unique().long()
    back = torch.zeros(len(pages.keys), dtype=torch.int32)
    back[order] = torch.arange(len(order), dtype=torch.int32)
    gate = None if pages.gate is None else pages.gate[order]
    keys, values, ranks = pages.keys[order], pages.values[order], pages.ranks[order]
    rest = pages.lengths, pages.format
    outputs.append(run(Pages(keys, values, ranks, gate, back[pages.table.long()], *rest)))
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])
