"""The ring in Triton: one program a row, which reads all it needs before it writes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

SEARCHED = 1024  # ranks that a program looks at together


@triton.jit
def _move(buffer, new, first, slot, end, last, gone, final, row, real, leaves, fills, expires, D: tl.constexpr,
          DP: tl.constexpr):  # fmt: skip
    """Do one buffer's part of a step: its old token at ``slot``, the new one, and what takes the place of ``gone``."""
    dims = tl.arange(0, DP)
    old = tl.load(buffer + (first + slot) * D + dims, mask=dims < tl.where(real, D, 0))
    tail = tl.load(buffer + (first + last) * D + dims, mask=dims < tl.where(expires, D, 0))
    token = tl.load(new + row * D + dims, mask=dims < tl.where(real, D, 0))
    tail = tl.where(final == end, tl.where(fills, token, old), tl.where(final == slot, token, tail))
    tl.store(buffer + (first + slot) * D + dims, token, mask=dims < tl.where(real, D, 0))
    tl.store(buffer + (first + end) * D + dims, old, mask=dims < tl.where(leaves, D, 0))
    tl.store(buffer + (first + gone) * D + dims, tail, mask=dims < tl.where(expires, D, 0))


@triton.jit(do_not_specialize=["ring", "window"])
def _append(keys, values, ranks, flags, starts, lengths, new_keys, new_values, new_flags, new_ranks, ring, window,
            heads, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BOUND: tl.constexpr,
            COUNT: tl.constexpr):  # fmt: skip
    """Take the new token of one row."""
    row = tl.cast(tl.program_id(0), tl.int64)
    rank = tl.load(new_ranks + row // heads)
    real = rank >= 0
    first, end = tl.load(starts + row), tl.load(lengths + row)
    place = tl.maximum(rank, 0) % ring
    fills = real & (place >= end)
    slot = tl.minimum(place, end)
    leaves = real & (place < end) & (tl.load(flags + first + slot) != 0)
    size = end + tl.cast(fills | leaves, tl.int64)
    gone, expires = end * 0, real & (ring < 0)  # never, but where there is a window
    if BOUND:
        # the slot of the token that no query sees any more, of those held before this step
        found = end * 0 - 1
        for n in range(0, end, COUNT):
            slots = n + tl.arange(0, COUNT)
            held = tl.load(ranks + first + slots, mask=slots < end, other=-1)
            found = tl.maximum(found, tl.max(tl.where(held == tl.maximum(rank - window, 0), slots, -1), 0))
        found = tl.where(real & (rank >= window), found, -1)
        size = tl.where(leaves & (found == slot), end, size)  # it leaves the ring, and the row
        leaves = leaves & (found != slot)
        expires = (found >= 0) & (found != slot)
        gone = tl.maximum(found, 0)
    final = tl.maximum(size - 1, 0)  # slot of the last token, once the new one is in
    last = tl.minimum(final, tl.maximum(end - 1, 0))
    after = tl.where(expires, final, size)
    _move(keys, new_keys, first, slot, end, last, gone, final, row, real, leaves, fills, expires, D, DP)
    _move(values, new_values, first, slot, end, last, gone, final, row, real, leaves, fills, expires, E, EP)
    _move(flags, new_flags, first, slot, end, last, gone, final, row, real, leaves, fills, expires, 1, 1)
    _move(ranks, new_ranks, first, slot, end, last, gone, final, row // heads, real, leaves, fills, expires, 1, 1)
    tl.store(lengths + row, after, mask=real)


@torch.compiler.disable
def triton_ring_append(
    *,
    keys: Tensor,
    values: Tensor,
    ranks: Tensor,
    flags: Tensor,
    starts: Tensor,
    lengths: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    new_flags: Tensor,
    new_ranks: Tensor,
    ring: int,
    window: int | None = None,
) -> None:
    """Do what :func:`ag.kernels.ring_append.ring_append` does on the card, which is never waited for."""
    dim, width = keys.shape[1], values.shape[1]
    with torch.cuda.device_of(keys):
        _append[(len(starts),)](
            *(keys, values, ranks, flags.view(torch.uint8), starts, lengths),
            *(new_keys.contiguous(), new_values.contiguous(), new_flags.contiguous().view(torch.uint8)),
            *(new_ranks.contiguous(), ring, window or 0, new_flags.shape[1]),
            *(dim, triton.next_power_of_2(dim), width, triton.next_power_of_2(width), window is not None, SEARCHED),
            num_warps=1,
        )
    increment_version([keys, values, ranks, flags, lengths])  # autograd does not see the kernel
