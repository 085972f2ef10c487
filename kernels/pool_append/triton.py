"""New tokens into pages in Triton: one program a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ag.kernels.pages import New, Pages, Reach, coded
from ag.kernels.tiles import places

SEARCHED = 1024  # ranks that a program looks at together


@triton.jit
def _place(table, slot, PAGE: tl.constexpr):
    """Return where in the pool a slot lies."""
    return tl.cast(tl.load(table + slot // PAGE), tl.int64) * PAGE + slot % PAGE


@triton.jit
def _put(column, fresh, row, source, target, new, there, D: tl.constexpr, DP: tl.constexpr):
    """Write a token to a place of a column: the new one, or that of another place."""
    dims = tl.arange(0, DP)
    mask = dims < tl.where(there, D, 0)
    held = tl.load(column + source * D + dims, mask=mask)
    if fresh is not None:
        token = tl.load(fresh + row * D + dims, mask=mask)
        held = tl.where(new, token.to(held.dtype), held)
    tl.store(column + target * D + dims, held, mask=mask)


@triton.jit
def _out_of_reach(ranks, gate, table, count, rank, recent, window, PAGE: tl.constexpr, COUNT: tl.constexpr):
    """Return the slots of what the query of a token of this rank no longer sees, -1 for none; each once."""
    leaves = tl.cast(tl.where((recent > 0) & (rank >= recent), rank - recent, -1), tl.int32)
    ends = tl.cast(tl.where((window > 0) & (rank >= window), rank - window, -1), tl.int32)
    first, second = count * 0 - 1, count * 0 - 1
    for n in range(0, count, COUNT):
        slots = n + tl.arange(0, COUNT)
        there = slots < count
        at = places(table, slots, there, PAGE)
        held = tl.load(ranks + at, mask=there, other=-1)
        closed = there & (held == leaves) & (leaves >= 0) & (held != ends)
        if gate is not None:
            closed = closed & (tl.load(gate + at, mask=there, other=1) == 0)
        first = tl.maximum(first, tl.max(tl.where(closed, slots, -1), 0))
        second = tl.maximum(second, tl.max(tl.where(there & (held == ends) & (ends >= 0), slots, -1), 0))
    return first, second


@triton.jit(do_not_specialize=["recent", "window"])
def _append(keys, values, ranks, gate, table, lengths, new_keys, new_values, new_ranks, new_gate, victims, moves, most,
            heads, recent, window, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
            PAGE: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    """Do one row; ``moves`` [R, V + 1, 2] gets slots (from, to) in their order, -1 for a new token or for none.

    Without victims, and with ``V`` of 2, those go that the new token no longer sees, found ``COUNT`` ranks at once.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    table += row * most
    moves += row * (V + 1) * 2
    length = tl.load(lengths + row)
    rank = tl.cast(length, tl.int64) * 0 - 1
    if new_ranks is not None:
        rank = tl.load(new_ranks + row // heads)
    waiting = rank >= 0
    bound = length + 1  # slots from here on are done
    leaves, passes = length * 0 - 1, length * 0 - 1
    if V > 0 and victims is None:
        leaves, passes = _out_of_reach(ranks, gate, table, length, rank, recent, window, PAGE, COUNT)
    for turn in tl.static_range(V + 1):
        slot = length * 0 - 1
        if turn < V:
            if victims is None:
                slot = tl.maximum(tl.where(leaves < bound, leaves, -1), tl.where(passes < bound, passes, -1))
            else:
                number = tl.arange(0, VP)
                slots = tl.load(victims + row * V + number, mask=number < V, other=-1)
                slot = tl.max(tl.where(slots < bound, slots, -1), 0)
        goes = slot >= 0
        behind = waiting & (turn == V)  # no victim was left for the new token
        dropped = goes & waiting & (slot == length)
        fresh = (goes & waiting & (slot != length)) | behind
        last = tl.where(goes & (~waiting), length - 1, length)
        moved = goes & (~waiting) & (slot != last)
        target = tl.where(behind, length, tl.maximum(slot, 0))
        source = tl.where(moved, last, target)
        there = fresh | moved
        at = _place(table, tl.where(there, target, 0), PAGE)
        origin = _place(table, tl.where(moved, source, 0), PAGE)
        _put(keys, new_keys, row, origin, at, fresh, there, D, DP)
        _put(values, new_values, row, origin, at, fresh, there, E, EP)
        if gate is not None:
            _put(gate, new_gate, row, origin, at, fresh, there, 1, 1)
        held = tl.load(ranks + origin, mask=moved, other=0)
        tl.store(ranks + at, tl.where(fresh, tl.cast(rank, tl.int32), held), mask=there)
        ends = goes & (~waiting)
        tl.store(moves + turn * 2, tl.where(ends, last, -1))
        tl.store(moves + turn * 2 + 1, tl.where(there | ends, target, -1))
        length = tl.where(behind, length + 1, last)
        waiting = waiting & (~fresh) & (~dropped)
        bound = tl.where(goes, slot, bound)
        tl.debug_barrier()  # what is moved next may have been written just now
    tl.store(lengths + row, length)


@triton.jit
def _carry(record, moves, width, slots, V: tl.constexpr, WP: tl.constexpr):
    """Let the numbers of a row's tokens go where the tokens went; those of new ones and of free slots are 0."""
    row = tl.cast(tl.program_id(0), tl.int64)
    numbers = tl.arange(0, WP)
    record += row * width * slots + numbers * slots
    for turn in tl.static_range(V + 1):
        source, target = tl.load(moves + (row * (V + 1) + turn) * 2), tl.load(moves + (row * (V + 1) + turn) * 2 + 1)
        there, moved = numbers < tl.where(target >= 0, width, 0), numbers < tl.where(source >= 0, width, 0)
        held = tl.load(record + source, mask=moved, other=0.0)
        tl.store(record + target, held, mask=there)
        tl.debug_barrier()
        tl.store(record + source, tl.zeros([WP], tl.float32), mask=moved)
        tl.debug_barrier()


@torch.compiler.disable
def triton_pool_append(
    pages: Pages, new: New | None, victims: Tensor | None, records: Sequence[Tensor], reach: Reach | None = None
) -> None:
    """Do what :func:`ag.kernels.pool_append.pool_append` does on the card, which is never waited for."""
    keys, values, ranks, gate, table, lengths, *_ = pages
    (_, page, dim), width, rows = keys.shape, values.shape[2], len(table)
    flags = None if gate is None else gate.view(torch.uint8) if gate.dtype == torch.bool else gate
    said = None
    if new is not None and gate is not None:
        said = gate.new_ones(rows) if new.gate is None else new.gate.contiguous()
        said = said.view(torch.uint8) if said.dtype == torch.bool else said
    recent, window = reach or (None, None)
    most = 2 if reach is not None else 0 if victims is None else victims.shape[1]
    fresh: tuple[Tensor | None, ...] = (None, None, None)
    if new is not None:
        fresh = *(x.contiguous() for x in coded(pages, new.keys, new.values)), new.ranks.contiguous()
    moves = torch.empty(rows, most + 1, 2, dtype=torch.int32, device=keys.device)
    with torch.cuda.device_of(keys):
        _append[(rows,)](
            *(keys, values, ranks, flags, table, lengths),
            *(*fresh, said, None if victims is None else victims.int().contiguous(), moves, table.shape[1]),
            *(1 if new is None else rows // len(new.ranks), recent or 0, window or 0),
            *(dim, triton.next_power_of_2(dim), width, triton.next_power_of_2(width)),
            *(page, most, triton.next_power_of_2(max(most, 1)), SEARCHED),
            num_warps=1 if reach is None else 4,
        )
        for record in records:
            count, slots = record.shape[1:]
            _carry[(rows,)](record, moves, count, slots, most, triton.next_power_of_2(count), num_warps=1)
    increment_version([*pages.columns, lengths, *records])  # autograd does not see the kernel
