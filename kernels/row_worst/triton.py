"""The worst token of each row in Triton: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ag.kernels.row_worst.reference import Going, Worst

SEARCHED = 4096  # slots that a program looks at together


@triton.jit(do_not_specialize=["width"])
def _worst(score, guarded, valid, ranks, counts, finite, slots, capacity, seen, rows, width, heads,
           COUNT: tl.constexpr):  # fmt: skip
    """Do one row; with a ``capacity`` what goes of it, beside what was ``seen`` so far, in place of what it holds."""
    row = tl.cast(tl.program_id(0), tl.int64)
    first = row * width
    held, fixed, wrong = width * 0, width * 0, width * 0
    place, newest, lowest = width * 0 - 1, width * 0 - 1, float("inf")
    for n in range(0, width, COUNT):
        at = n + tl.arange(0, COUNT)
        there = tl.load(valid + first + at, mask=at < width, other=0) != 0
        rivals = there & (tl.load(guarded + first + at, mask=there, other=1) == 0)
        found = tl.load(score + first + at, mask=rivals, other=float("inf")).to(tl.float32)
        held += tl.sum(there.to(tl.int32), 0)
        fixed += tl.sum((there & (~rivals)).to(tl.int32), 0)
        wrong += tl.sum((rivals & ~(tl.abs(found) < float("inf"))).to(tl.int32), 0)
        found = tl.where(found == found, found, float("inf"))  # the least of what is no number is not defined
        order = at
        if ranks is not None:
            order = tl.cast(tl.load(ranks + first + at, mask=rivals, other=-1), tl.int32)
        least = tl.min(found, 0)
        order = tl.where(rivals & (found == least), order, -1)
        latest = tl.max(order, 0)
        better = (least < lowest) | ((least == lowest) & (latest > newest))
        place = tl.where(better, tl.max(tl.where((order == latest) & (order >= 0), at, -1), 0), place)
        newest = tl.where(better, latest, newest)
        lowest = tl.where(better, least, lowest)
    if capacity is not None:
        room = tl.load(capacity + row // heads)
        place = tl.where(held > tl.maximum(room, tl.cast(fixed, tl.int64)), place, -1)
        found = tl.where(wrong > 0, 1, 0) + tl.where(fixed > room, 2, 0)
        tl.store(seen + row, tl.load(seen + row) | found.to(tl.uint8))
    else:
        tl.store(counts + row, tl.cast(held, tl.int64))
        tl.store(counts + rows + row, tl.cast(fixed, tl.int64))
        tl.store(finite + row, (wrong == 0).to(tl.uint8))
    tl.store(slots + row, place)


@torch.compiler.disable
def triton_row_worst(score: Tensor, protected: Tensor, valid: Tensor, ranks: Tensor | None = None) -> Worst:
    """Do what :func:`ag.kernels.row_worst.row_worst` does on the card, which is never waited for."""
    number, device = score.shape[:-1], score.device
    counts = torch.empty(2, *number, dtype=torch.long, device=device)
    finite = torch.empty(number, dtype=torch.bool, device=device)
    slot = torch.empty(number, dtype=torch.int32, device=device)
    _search(score, protected, valid, ranks, counts, finite.view(torch.uint8), slot, None, None)
    held, fixed = counts
    return Worst(held, fixed, finite, slot)


@torch.compiler.disable
def triton_row_going(
    score: Tensor, protected: Tensor, valid: Tensor, ranks: Tensor | None, capacity: Tensor, going: Going
) -> None:
    """Do what :func:`ag.kernels.row_worst.row_going` does on the card, which is never waited for."""
    _search(score, protected, valid, ranks, None, None, going.slots, capacity.contiguous(), going.found)


def _search(
    score: Tensor, protected: Tensor, valid: Tensor, ranks: Tensor | None, counts: Tensor | None, *others: Tensor | None
) -> None:
    rows, width = score.shape[:-1].numel(), score.shape[-1]
    with torch.cuda.device_of(score):
        _worst[(rows,)](
            *(score.contiguous(), *(x.contiguous().view(torch.uint8) for x in (protected, valid))),
            *(None if ranks is None else ranks.contiguous(), counts, *others),
            *(rows, width, score.shape[1], min(SEARCHED, triton.next_power_of_2(max(width, 1)))),
            num_warps=4,
        )
