"""Compaction in Triton: one program for each row assigns tokens to free slots; further programs move them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ag.kernels.dispatch import INTERPRETED
from ag.kernels.pages import Pages
from ag.kernels.tiles import copy_tokens, pool_indices

FEW_EVICTED = 8  # up to this number, the evicted tokens are found one by one
NEVER_EVICTED = 1 << 62  # key of a token that must be kept, above all other keys
HIGHEST_BIT = 62  # highest bit of the keys, where the search by bits begins


@triton.jit
def _eviction_keys(slots, count, token_indices, table, score, PAGE: tl.constexpr, LAST: tl.constexpr):
    """Return a number for each token, the smallest go first, LAST if it may not go; and the count of NaN.

    A number is made of the score, whose bits are mapped to integers in the same order, and of the token's token index.
    """
    valid = slots < count
    token_index = tl.load(token_indices + pool_indices(table, slots, valid, PAGE), mask=valid, other=0).to(tl.int64)
    s = tl.load(score + slots, mask=valid, other=float("inf"))
    num_nan = tl.sum((s != s).to(tl.int32), 0)
    s = tl.where(s != s, float("-inf"), s)
    bits = tl.where(s == 0, 0.0, s).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    number = bits.to(tl.int64) * 2147483648 + (2147483647 - token_index)
    return tl.where(s < float("inf"), number, LAST), num_nan


@triton.jit(do_not_specialize=["N"])
def _plan_moves(token_indices, table, lengths, old_lengths, moves, source, target, score, keep_count, nonfinite,
                score_sequence, score_head, stride, N, H, PAGE: tl.constexpr, TILE: tl.constexpr,
                FEW_EVICTED: tl.constexpr, HIGHEST_BIT: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """Write the slots of a row's holes to ``target``, and of the tokens that fill them to ``source``."""
    row = tl.cast(tl.program_id(0), tl.int64)
    table += row * stride
    source += row * N
    target += row * N
    score += row // H * score_sequence + row % H * score_head
    count = tl.load(lengths + row)
    surplus = count - tl.load(keep_count + row)
    num_evictable, num_nan = count * 0, count * 0
    if surplus > 0:
        for n in range(0, count, TILE):
            number, nan = _eviction_keys(n + tl.arange(0, TILE), count, token_indices, table, score, PAGE, LAST)
            num_evictable += tl.sum((number < LAST).to(tl.int32), 0)
            num_nan += nan
    if nonfinite is not None and num_nan > 0:
        tl.store(nonfinite + row, 1)
    num_evicted = tl.maximum(tl.minimum(surplus, num_evictable), 0)
    kept, limit = count - num_evicted, tl.cast(count, tl.int64) * 0 - LAST
    # limit: the largest key that goes. All evictable: LAST - 1. Few: the smallest key above the last limit, num_evicted
    # times. Else bit by bit: the largest number with fewer than num_evicted keys below it.
    rounds = tl.where(num_evicted <= FEW_EVICTED, num_evicted, HIGHEST_BIT + 1)
    rounds = tl.where(num_evicted == num_evictable, 0, rounds)
    for turn in range(0, rounds):
        middle = limit + (tl.cast(1, tl.int64) << tl.maximum(HIGHEST_BIT - turn, 0))
        lowest, below = limit * 0 + LAST, count * 0
        for n in range(0, count, TILE):
            number, nan = _eviction_keys(n + tl.arange(0, TILE), count, token_indices, table, score, PAGE, LAST)
            lowest = tl.minimum(lowest, tl.min(tl.where(number > limit, number, LAST), 0))
            below += tl.sum((number < middle).to(tl.int32), 0)
        limit = tl.where(num_evicted <= FEW_EVICTED, lowest, tl.where(below < num_evicted, middle, limit))
    limit = tl.where((num_evicted == num_evictable) & (surplus > 0), limit * 0 + LAST - 1, limit)
    holes, movers = count * 0, count * 0
    for n in range(0, count, TILE):
        slots = n + tl.arange(0, TILE)
        valid = slots < count
        number, nan = _eviction_keys(slots, count, token_indices, table, score, PAGE, LAST)
        evicted = number <= limit
        hole, mover = valid & evicted & (slots < kept), valid & (~evicted) & (slots >= kept)
        tl.store(target + holes + tl.cumsum(hole.to(tl.int32), 0) - 1, slots, mask=hole)
        tl.store(source + movers + tl.cumsum(mover.to(tl.int32), 0) - 1, slots, mask=mover)
        holes += tl.sum(hole.to(tl.int32), 0)
        movers += tl.sum(mover.to(tl.int32), 0)
    tl.store(old_lengths + row, count)
    tl.store(moves + row, holes)
    tl.store(lengths + row, kept)


@triton.jit(do_not_specialize=["blocks", "N"])
def _move(keys, values, token_indices, gate, table, moves, source, target, stride, blocks, N, D: tl.constexpr,
          DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Move TOKENS of the tokens of a row that fill holes; no program reads a place that another one writes."""
    row, first = tl.cast(tl.program_id(0) // blocks, tl.int64), tl.program_id(0) % blocks * TOKENS
    count = tl.load(moves + row)
    if first >= count:
        return
    number = first + tl.arange(0, TOKENS)
    mask = number < count
    table += row * stride
    source_index = pool_indices(table, tl.load(source + row * N + number, mask=mask, other=0), mask, PAGE)
    target_index = pool_indices(table, tl.load(target + row * N + number, mask=mask, other=0), mask, PAGE)
    copy_tokens(keys, keys, D, source_index, target_index, mask, D, DP)
    copy_tokens(values, values, E, source_index, target_index, mask, E, EP)
    tl.store(token_indices + target_index, tl.load(token_indices + source_index, mask=mask, other=0), mask=mask)
    if gate is not None:
        tl.store(gate + target_index, tl.load(gate + source_index, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["N", "S"])
def _move_records(record, lengths, old_lengths, moves, source, target, N, S, C, TILE: tl.constexpr):
    """Move one record of a row with its tokens, and clear the free slots."""
    row = tl.cast(tl.program_id(0) // C, tl.int64)
    record += tl.cast(tl.program_id(0), tl.int64) * S
    count = tl.load(moves + row)
    for n in range(0, count, TILE):
        number = n + tl.arange(0, TILE)
        mask = number < count
        x = tl.load(record + tl.load(source + row * N + number, mask=mask, other=0), mask=mask, other=0.0)
        tl.store(record + tl.load(target + row * N + number, mask=mask, other=0), x, mask=mask)
    tl.debug_barrier()  # the slots that are cleared have been read
    end = tl.load(old_lengths + row)
    for n in range(tl.load(lengths + row), end, TILE):
        slots = n + tl.arange(0, TILE)
        tl.store(record + slots, tl.zeros([TILE], tl.float32), mask=slots < end)


@torch.compiler.disable
def kv_compact(
    pages: Pages, score: Tensor, keep_count: Tensor, records: Sequence[Tensor] = (), nonfinite: Tensor | None = None
) -> None:
    """Do what :func:`ag.kernels.kv_compact.kv_compact` does on a GPU, without synchronising."""
    keys, values, token_indices, gate, table, lengths, *_ = pages
    (rows, table_width), (_, page, dim), width = table.shape, keys.shape, values.shape[2]
    slots = table_width * page
    old_lengths, moves = torch.empty_like(lengths), torch.empty_like(lengths)
    source, target = torch.empty(2, rows, slots, dtype=torch.int32, device=keys.device)
    score = score if score.stride(2) == 1 else score.contiguous()
    of_head = 0 if score.shape[1] == 1 else score.stride(1)
    tile = 16 if INTERPRETED else min(2048, triton.next_power_of_2(max(slots, 1)))
    tokens = 16 if INTERPRETED else 32
    blocks = triton.cdiv(slots, tokens)
    flags = gate.view(torch.uint8) if gate is not None and gate.dtype == torch.bool else gate
    with torch.cuda.device_of(keys):
        _plan_moves[(rows,)](
            *(token_indices, table, lengths, old_lengths, moves, source, target, score, keep_count, nonfinite),
            *(score.stride(0), of_head, table.stride(0), slots, rows // len(score), page, tile),
            *(FEW_EVICTED, HIGHEST_BIT, NEVER_EVICTED),
        )
        if blocks:
            _move[(rows * blocks,)](
                *(keys, values, token_indices, flags, table, moves, source, target, table.stride(0), blocks, slots),
                *(dim, triton.next_power_of_2(dim), width, triton.next_power_of_2(width), page, tokens),
            )
        for record in records:
            count, wide = record.shape[1:]
            _move_records[(rows * count,)](
                record, lengths, old_lengths, moves, source, target, slots, wide, count, tile
            )
