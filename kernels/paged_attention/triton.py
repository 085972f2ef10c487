"""Attention to rows in pages in Triton: rows are split into chunks, and even a few queries use the whole GPU.

The lengths of rows exist only on the GPU, and the block table is as wide as the longest row so far. Programs therefore
read the lengths, and divide the tokens of all rows into chunks of equal size; a row's last chunk may be shorter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ag.kernels.dispatch import INTERPRETED
from ag.kernels.pages import Pages
from ag.kernels.softmax import PLAIN, Softmax
from ag.kernels.tiles import (
    FLOAT32,
    LOG2E,
    cap2,
    cap_logits,
    load_rows,
    load_tokens,
    logits2,
    padded,
    pool_indices,
    shape,
    size_class,
    softmax_update,
    tuned,
)

CHUNKS = 512  # for all rows together, plus at most one for each row; 1024 and 2048 were slower on an H100
MIN_SPLIT = 32 if INTERPRETED else 128  # size of a chunk is a multiple of this, except for a row's last chunk
STRIDE = tl.constexpr(256)  # lengths that are read at once
WEIGHT_TILE = 1024  # weights that a program normalises


@triton.jit
def _chunk(lengths, rows, blocks, chunks, min_tokens):
    """Return the number of tokens of a chunk, a multiple of ``min_tokens``.

    Each block of queries has a program for each chunk: ``blocks`` programs read a chunk. All rows together have about
    ``chunks`` programs.
    """
    total = tl.cast(0, tl.int64)
    for n in range(0, rows, STRIDE):
        row = n + tl.arange(0, STRIDE)
        total += tl.sum(tl.load(lengths + row, mask=row < rows, other=0).to(tl.int64), 0)
    return (tl.maximum(tl.cdiv(total * blocks, chunks * min_tokens), 1) * min_tokens).to(tl.int32)


@triton.jit(do_not_specialize=["stride", "rows", "chunks", "min_tokens", "blocks", "size", "window", "recent", "T",
                               "GT", "weights_width"])  # fmt: skip
def _attend(q, keys, values, gate, table, lengths, query_indices, partial, lse, weights, scale, stride, rows, chunks,
            min_tokens, blocks, size, window, recent, T, GT, weights_width, heads, QUERIES: tl.constexpr,
            D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PAGE: tl.constexpr,
            CODED: tl.constexpr, key_indices, cap, ROWS: tl.constexpr):  # fmt: skip
    """Attend from a block of the GT queries of a row to one of its chunks; programs past the last chunk write nothing.

    Logits are stored in ``weights`` ``[R, GT, weights_width]``, unless it is None; :func:`_combine` normalises them.
    """
    item, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    chunk = _chunk(lengths, rows, blocks, chunks, min_tokens)
    # for this item: its row, the number of chunks of earlier rows, and of all rows read so far
    row, chunks_before, end = 0, 0, 0
    for n in range(0, rows, STRIDE):
        row_ids = n + tl.arange(0, STRIDE)
        row_lengths = tl.load(lengths + row_ids, mask=row_ids < rows, other=0)
        ends = end + tl.cumsum(tl.cdiv(row_lengths, chunk), 0)
        earlier = (ends <= item) & (row_ids < rows)
        row += tl.sum(earlier.to(tl.int32), 0)
        chunks_before = tl.maximum(chunks_before, tl.max(tl.where(earlier, ends, 0), 0))
        end = tl.max(ends, 0)
    if row >= rows:
        return
    row = tl.cast(row, tl.int64)
    first, count = (item - chunks_before) * chunk, tl.load(lengths + row)
    stop = tl.minimum(first + chunk, count)
    table += row * stride
    start = block * QUERIES
    queries = load_rows(q + row * GT * D, D, start, GT, QUERIES, D, DP)
    number = start + tl.arange(0, QUERIES)
    total, largest = tl.zeros([QUERIES], tl.float32), tl.full([QUERIES], float("-inf"), tl.float32)
    mixed = tl.zeros([QUERIES, EP], tl.float32)
    if query_indices is not None:
        query_index = tl.load(query_indices + row // heads * T + number % T, mask=number < GT, other=-1)[:, None]
    for n in range(first, stop, ROWS):
        slots = n + tl.arange(0, ROWS)
        valid = slots < stop
        pool_index = pool_indices(table, slots, valid, PAGE)
        k = load_tokens(keys, pool_index, valid, q.dtype.element_ty, D, DP, CODED)
        s = tl.dot(queries, tl.trans(k), input_precision=FLOAT32) * scale
        s = cap_logits(s, cap)
        visible = valid[None, :]
        if query_indices is not None:
            key_index = tl.load(key_indices + pool_index, mask=valid, other=0)[None, :]
            visible = visible & (key_index <= query_index)
            if window is not None:
                visible = visible & (key_index > query_index - window)
            if gate is not None:
                flagged = tl.load(gate + pool_index, mask=valid, other=0)[None, :] != 0
                visible = visible & (flagged | (key_index > query_index - recent))
        s = tl.where(visible, s, float("-inf"))
        if weights is not None:
            mask = (number < GT)[:, None] & valid[None, :]
            tl.store(weights + (row * GT + number)[:, None] * weights_width + slots[None, :], s, mask=mask)
        v = load_tokens(values, pool_index, valid, q.dtype.element_ty, E, EP, CODED)
        total, largest, mixed = softmax_update(s, v, total, largest, mixed)
    empty = total == 0.0
    mixed = mixed / tl.where(empty, 1.0, total)[:, None]
    dims, left = tl.arange(0, EP), tl.cast(item, tl.int64) * GT + number
    mask = (number < GT)[:, None] & (dims < E)[None, :]
    tl.store(partial + left[:, None] * E + dims[None, :], mixed, mask=mask)
    sums = tl.where(empty, float("-inf"), largest + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + left, sums, mask=number < GT)


@triton.jit(do_not_specialize=["rows", "chunks", "min_tokens", "blocks", "weights_width", "weight_tiles", "T", "H"])
def _combine(partial, lse, lengths, out, weights, sinks, rows, chunks, min_tokens, blocks, weights_width, weight_tiles,
             GT, T, H, E: tl.constexpr, EP: tl.constexpr, CHUNK_TILE: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Combine the chunks of one of the T queries of one of the H heads; a row without tokens gives 0.

    Each program of a query normalises SLOTS of its ``weights``; the first program writes the output.
    """
    query, weight_tile = tl.cast(tl.program_id(0) // weight_tiles, tl.int64), tl.program_id(0) % weight_tiles
    row, query_of_row = query // GT, query % GT
    dims, width = tl.arange(0, EP), tl.where(weight_tile == 0, E, 0)
    count, chunk = tl.load(lengths + row), _chunk(lengths, rows, blocks, chunks, min_tokens)
    first = tl.cast(0, tl.int64)
    for n in range(0, row, STRIDE):
        row_ids = n + tl.arange(0, STRIDE)
        first += tl.sum(tl.cdiv(tl.load(lengths + row_ids, mask=row_ids < row, other=0), chunk), 0)
    stop = first + tl.cdiv(count, chunk)
    total, largest, mixed = 0.0, float("-inf"), tl.zeros([EP], tl.float32)
    if sinks is not None:
        total, largest = 1.0, tl.load(sinks + query // T % H)
    for n in range(first, stop, CHUNK_TILE):
        items = n + tl.arange(0, CHUNK_TILE)
        sums = tl.load(lse + items * GT + query_of_row, mask=items < stop, other=float("-inf"))
        larger = tl.maximum(largest, tl.max(sums, 0))
        finite = tl.where(larger == float("-inf"), 0.0, larger)  # a query may see nothing of a chunk
        weight = tl.exp2(sums - finite)
        shrink = tl.exp2(largest - finite)
        mask = (items < stop)[:, None] & (dims < width)[None, :]
        tile = tl.load(partial + (items * GT + query_of_row)[:, None] * E + dims[None, :], mask=mask, other=0.0)
        mixed = mixed * shrink + tl.sum(tile * weight[:, None], 0)
        total, largest = total * shrink + tl.sum(weight, 0), larger
    empty = total == 0.0
    total, largest = tl.where(empty, 1.0, total), tl.where(empty, 0.0, largest)
    tl.store(out + query * E + dims, (mixed / total).to(out.dtype.element_ty), mask=dims < width)
    if weights is not None:
        slots = weight_tile * SLOTS + tl.arange(0, SLOTS)
        weights += query * weights_width
        logits = tl.load(weights + slots, mask=slots < count, other=float("-inf"))
        tl.store(weights + slots, tl.exp2(logits - largest) / total, mask=slots < weights_width)


TOKENS = [shape(8, 2, ROWS=64), shape(4, 2, ROWS=64), shape(4, 2, ROWS=32), shape(8, 1, ROWS=32)]
TOKENS += [shape(8, 3, ROWS=16), shape(8, 1, ROWS=16)]
ATTEND = tuned(["QUERIES", "D", "E", "CODED", "size", "window"], TOKENS, 2**14, ROWS=16)(_attend)


@torch.compiler.disable
def paged_attention(
    q: Tensor,
    pages: Pages,
    query_indices: Tensor | None,
    scaling: float,
    window: int | None = None,
    recent: int | None = None,
    softmax: Softmax = PLAIN,
    weigh: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Do what :func:`ag.kernels.paged_attention.paged_attention` does on a GPU, without synchronising."""
    (batch, heads, count, dim), (rows, table_width) = q.shape, pages.block_table.shape
    page, width = pages.keys.shape[1], pages.channels[1]
    slots, queries = table_width * page, batch * heads // rows * count
    large = (q.element_size() > 2) + (max(dim, width) > 128)  # a block's output must fit in registers
    block = min(padded(queries), 16 if INTERPRETED else 64 >> large)
    blocks = triton.cdiv(queries, block)
    # at most: the last chunk of each row may be short
    items = min(CHUNKS // blocks, rows * triton.cdiv(slots, MIN_SPLIT)) + rows
    shared_out = rows, CHUNKS, MIN_SPLIT, blocks
    gates = None if pages.gate is None or recent is None else pages.gate.view(torch.uint8)
    partial = torch.empty(items, queries, width, dtype=torch.float32, device=q.device)
    lse = torch.empty(items, queries, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, heads, count, width, dtype=q.dtype, device=q.device)
    weights = torch.empty(batch, heads, slots, dtype=torch.float32, device=q.device) if weigh else None
    lengths, longest = pages.lengths.contiguous(), slots if weigh else 0
    weight_tile = 16 if INTERPRETED else WEIGHT_TILE
    weight_tiles = max(1, triton.cdiv(longest, weight_tile))
    with torch.cuda.device_of(q):
        if slots:
            ATTEND[(items * blocks,)](
                *(
                    q.contiguous(),
                    pages.keys.contiguous(),
                    pages.values.contiguous(),
                    gates,
                    pages.block_table,
                    lengths,
                ),
                *(None if query_indices is None else query_indices.int().contiguous(), partial, lse, weights),
                *(scaling * LOG2E, pages.block_table.stride(0), *shared_out, size_class(slots), window, recent, count),
                *(queries, longest),
                *(rows // batch, block, dim, padded(dim), width, padded(width), page, pages.format is not None),
                *(pages.token_indices, cap2(softmax.cap)),
            )
        _combine[(rows * queries * weight_tiles,)](
            *(partial, lse, lengths, out, weights, logits2(softmax.sinks), *shared_out, longest, weight_tiles),
            *(queries, count, heads, width, padded(width), 32, weight_tile),
        )
    return out, weights
