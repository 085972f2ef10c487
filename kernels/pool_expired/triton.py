"""What leaves the recent tokens or the window, in Triton: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ag.kernels.pages import Pages
from ag.kernels.tiles import places

SEARCHED = 1024  # ranks that a program looks at together


@triton.jit(do_not_specialize=["recent", "window", "most"])
def _expired(ranks, gate, table, lengths, new_ranks, out, recent, window, most, heads, PAGE: tl.constexpr,
             COUNT: tl.constexpr):  # fmt: skip
    """Find both tokens of one row."""
    row = tl.cast(tl.program_id(0), tl.int64)
    new, count = tl.load(new_ranks + row // heads), tl.load(lengths + row)
    leaves = tl.cast(tl.where((recent > 0) & (new >= recent), new - recent, -1), tl.int32)
    ends = tl.cast(tl.where((window > 0) & (new >= window), new - window, -1), tl.int32)
    first, second = count * 0 - 1, count * 0 - 1
    for n in range(0, count, COUNT):
        slots = n + tl.arange(0, COUNT)
        there = slots < count
        at = places(table + row * most, slots, there, PAGE)
        held = tl.load(ranks + at, mask=there, other=-1)
        closed = there & (held == leaves) & (leaves >= 0) & (held != ends)
        if gate is not None:
            closed = closed & (tl.load(gate + at, mask=there, other=1) == 0)
        first = tl.maximum(first, tl.max(tl.where(closed, slots, -1), 0))
        second = tl.maximum(second, tl.max(tl.where(there & (held == ends) & (ends >= 0), slots, -1), 0))
    tl.store(out + row * 2, first)
    tl.store(out + row * 2 + 1, second)


@torch.compiler.disable
def triton_pool_expired(pages: Pages, ranks: Tensor, recent: int | None, window: int | None) -> Tensor:
    """Do what :func:`ag.kernels.pool_expired.pool_expired` does on the card, which is never waited for."""
    table, rows = pages.table, len(pages.table)
    out = torch.empty(rows, 2, dtype=torch.int32, device=table.device)
    gate = None if pages.gate is None or recent is None else pages.gate.view(torch.uint8)
    with torch.cuda.device_of(table):
        _expired[(rows,)](
            *(pages.ranks, gate, table, pages.lengths, ranks.contiguous(), out, recent or 0, window or 0),
            *(table.shape[1], rows // len(ranks), pages.keys.shape[1], SEARCHED),
            num_warps=4,
        )
    return out
