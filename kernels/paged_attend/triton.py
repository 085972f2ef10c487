"""Attention from several new tokens to rows in pages in Triton: rows are split, so that few queries fill a card too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ag.kernels.dispatch import interpreting
from ag.kernels.paged_decode.triton import CHUNKS, cap2, combine
from ag.kernels.pages import Pages
from ag.kernels.softmax import PLAIN, Softmax
from ag.kernels.tiles import FLOAT32, bend, load_rows, load_tokens, mix, places
from ag.kernels.tuned import LOG2E, Tuned, logits2, padded, size_class


@triton.jit(do_not_specialize=["stride", "chunk", "chunks", "blocks", "size", "window", "recent", "T", "GT"])
def _attend(q, keys, values, gate, table, lengths, at, partial, lse, scale, stride, chunk, chunks, blocks, size,
            window, recent, T, GT, heads, QUERIES: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr,
            EP: tl.constexpr, PAGE: tl.constexpr, CODED: tl.constexpr, held, cap, ROWS: tl.constexpr):  # fmt: skip
    """Attend from a block of the GT queries of a row to one chunk of it; nothing is left of chunks behind its end."""
    item = tl.program_id(0)
    piece, block = item % chunks, item // chunks % blocks
    row = tl.cast(item // chunks // blocks, tl.int64)
    first, count = piece * chunk, tl.load(lengths + row)
    if first >= count:
        return
    stop = tl.minimum(first + chunk, count)
    table += row * stride
    start = block * QUERIES
    queries = load_rows(q + row * GT * D, D, start, GT, QUERIES, D, DP)
    number = start + tl.arange(0, QUERIES)
    own = tl.load(at + row // heads * T + number % T, mask=number < GT, other=-1)[:, None]
    total, largest = tl.zeros([QUERIES], tl.float32), tl.full([QUERIES], float("-inf"), tl.float32)
    mixed = tl.zeros([QUERIES, EP], tl.float32)
    for n in range(first, stop, ROWS):
        slots = n + tl.arange(0, ROWS)
        there = slots < stop
        where = places(table, slots, there, PAGE)
        k = load_tokens(keys, where, there, q.dtype.element_ty, D, DP, CODED)
        s = tl.dot(queries, tl.trans(k), input_precision=FLOAT32) * scale
        s = bend(s, cap)
        rank = tl.load(held + where, mask=there, other=0)[None, :]
        seen = there[None, :] & (rank <= own)
        if window is not None:
            seen = seen & (rank > own - window)
        if gate is not None:
            opened = tl.load(gate + where, mask=there, other=0)[None, :] != 0
            seen = seen & (opened | (rank > own - recent))
        s = tl.where(seen, s, float("-inf"))
        v = load_tokens(values, where, there, q.dtype.element_ty, E, EP, CODED)
        total, largest, mixed = mix(s, v, total, largest, mixed)
    empty = total == 0.0
    mixed = mixed / tl.where(empty, 1.0, total)[:, None]
    dims, left = tl.arange(0, EP), (row * chunks + piece) * GT + number
    mask = (number < GT)[:, None] & (dims < E)[None, :]
    tl.store(partial + left[:, None] * E + dims[None, :], mixed, mask=mask)
    sums = tl.where(empty, float("-inf"), largest + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + left, sums, mask=number < GT)


ATTEND = Tuned(_attend, ["QUERIES", "D", "E", "CODED", "size"])


@torch.compiler.disable
def triton_paged_attend(
    q: Tensor,
    pages: Pages,
    ranks: Tensor,
    scaling: float,
    window: int | None = None,
    recent: int | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Do what :func:`ag.kernels.paged_attend.paged_attend` does on the card, which is never waited for."""
    (batch, heads, count, dim), (rows, most) = q.shape, pages.table.shape
    page, width = pages.keys.shape[1], pages.channels[1]
    slots, queries = most * page, batch * heads // rows * count
    large = (q.element_size() > 2) + (max(dim, width) > 128)  # so that a block's output fits in registers
    block = min(padded(queries), 16 if interpreting() else 64 >> large)
    blocks = triton.cdiv(queries, block)
    chunk = 32 if interpreting() else max(256, triton.next_power_of_2(rows * blocks * slots // CHUNKS + 1))
    chunks = triton.cdiv(slots, chunk)
    gates = None if pages.gate is None or recent is None else pages.gate.view(torch.uint8)
    partial = torch.empty(rows * chunks, queries, width, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows * chunks, queries, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, heads, count, width, dtype=q.dtype, device=q.device)
    lengths = pages.lengths.contiguous()
    if chunks:
        ATTEND(
            lambda meta: (rows * blocks * chunks,),
            *(q.contiguous(), pages.keys.contiguous(), pages.values.contiguous(), gates, pages.table, lengths),
            *(ranks.int().contiguous(), partial, lse, scaling * LOG2E, pages.table.stride(0), chunk, chunks, blocks),
            *(size_class(slots), window, recent, count, queries, rows // batch, block),
            *(dim, padded(dim), width, padded(width), page, pages.format is not None, pages.ranks, cap2(softmax)),
        )
    with torch.cuda.device_of(q):
        combine[(rows * queries,)](
            *(partial, lse, lengths, out, None, logits2(softmax.sinks), chunk, max(chunks, 1), 0, 1),
            *(queries, count, heads, width, padded(width), 32, 16),
        )
    return out
