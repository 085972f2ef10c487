"""Decoding over rows in pages in Triton: rows are split into chunks, so that few long rows fill the card too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ag.kernels.dispatch import interpreting
from ag.kernels.pages import Pages
from ag.kernels.softmax import PLAIN, Softmax
from ag.kernels.tiles import FLOAT32, bend, load_rows, load_tokens, mix, places
from ag.kernels.tuned import LOG2E, Tuned, logits2, padded, size_class

CHUNKS = 1024  # about how many chunks all rows are cut into that fill the table: a few for each processor of a card
PIECE = 1024  # weights that a program normalises


@triton.jit(do_not_specialize=["stride", "chunk", "chunks", "size", "N"])
def _split(q, keys, values, table, lengths, partial, lse, weights, scale, stride, chunk, chunks, size, N, G,
           GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PAGE: tl.constexpr,
           CODED: tl.constexpr, cap, ROWS: tl.constexpr):  # fmt: skip
    """Attend from the G queries of a row to one chunk of it; nothing is left of chunks behind its end.

    Where somebody wants the ``weights``, their places get the logits, which the other kernel normalises.
    """
    item = tl.cast(tl.program_id(0), tl.int64)
    row, first = item // chunks, item % chunks * chunk
    count = tl.load(lengths + row)
    if first >= count:
        return
    stop = tl.minimum(first + chunk, count)
    table += row * stride
    queries = load_rows(q + row * G * D, D, 0, G, GP, D, DP)
    heads = tl.arange(0, GP)
    total, largest = tl.zeros([GP], tl.float32), tl.full([GP], float("-inf"), tl.float32)
    mixed = tl.zeros([GP, EP], tl.float32)
    for n in range(first, stop, ROWS):
        slots = n + tl.arange(0, ROWS)
        there = slots < stop
        at = places(table, slots, there, PAGE)
        k = load_tokens(keys, at, there, q.dtype.element_ty, D, DP, CODED)
        s = tl.dot(queries, tl.trans(k), input_precision=FLOAT32) * scale
        s = bend(s, cap)
        s = tl.where(there[None, :], s, float("-inf"))
        if weights is not None:
            mask = (heads < G)[:, None] & there[None, :]
            tl.store(weights + (row * G + heads)[:, None] * N + slots[None, :], s, mask=mask)
        v = load_tokens(values, at, there, q.dtype.element_ty, E, EP, CODED)
        total, largest, mixed = mix(s, v, total, largest, mixed)
    dims = tl.arange(0, EP)
    mask = (heads < G)[:, None] & (dims < E)[None, :]
    tl.store(partial + item * G * E + heads[:, None] * E + dims[None, :], mixed / total[:, None], mask=mask)
    tl.store(lse + item * G + heads, largest + tl.log2(total), mask=heads < G)


@triton.jit(do_not_specialize=["chunk", "chunks", "N", "pieces", "T", "H"])
def combine(partial, lse, lengths, out, weights, sinks, chunk, chunks, N, pieces, G, T, H, E: tl.constexpr,
             EP: tl.constexpr, CHUNKS: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Mix the chunks of one query, of T of a head and of H heads; a row without tokens gives 0.

    Of the ``weights`` of a query each of its programs normalises a piece of SLOTS; the first one makes the output.
    """
    query, piece = tl.cast(tl.program_id(0) // pieces, tl.int64), tl.program_id(0) % pieces
    row, head = query // G, query % G
    dims, width = tl.arange(0, EP), tl.where(piece == 0, E, 0)
    count = tl.load(lengths + row)
    first = row * chunks
    stop = first + tl.cdiv(count, chunk)
    total, largest, mixed = 0.0, float("-inf"), tl.zeros([EP], tl.float32)
    if sinks is not None:
        total, largest = 1.0, tl.load(sinks + query // T % H)
    for n in range(first, stop, CHUNKS):
        items = n + tl.arange(0, CHUNKS)
        sums = tl.load(lse + items * G + head, mask=items < stop, other=float("-inf"))
        larger = tl.maximum(largest, tl.max(sums, 0))
        finite = tl.where(larger == float("-inf"), 0.0, larger)  # a query may see nothing of a chunk
        weight = tl.exp2(sums - finite)
        shrink = tl.exp2(largest - finite)
        mask = (items < stop)[:, None] & (dims < width)[None, :]
        tile = tl.load(partial + (items * G + head)[:, None] * E + dims[None, :], mask=mask, other=0.0)
        mixed = mixed * shrink + tl.sum(tile * weight[:, None], 0)
        total, largest = total * shrink + tl.sum(weight, 0), larger
    empty = total == 0.0
    total, largest = tl.where(empty, 1.0, total), tl.where(empty, 0.0, largest)
    tl.store(out + query * E + dims, (mixed / total).to(out.dtype.element_ty), mask=dims < width)
    if weights is not None:
        slots = piece * SLOTS + tl.arange(0, SLOTS)
        weights += query * N
        logits = tl.load(weights + slots, mask=slots < count, other=float("-inf"))
        tl.store(weights + slots, tl.exp2(logits - largest) / total, mask=slots < N)


SPLIT = Tuned(_split, ["GP", "D", "E", "CODED", "size"])


def cap2(softmax: Softmax) -> float | None:
    """Return the cap of logits in base 2."""
    return None if softmax.cap is None else softmax.cap * LOG2E


@torch.compiler.disable
def triton_paged_decode(
    q: Tensor, pages: Pages, scaling: float, weights: Tensor | None = None, softmax: Softmax = PLAIN
) -> Tensor:
    """Compute :func:`ag.kernels.paged_decode.paged_decode` on the card, which is never waited for.

    The attention weights go into ``weights`` ``[B, H, most page]`` float32, contiguous, where somebody wants them.

    How many tokens the rows hold is known to the card alone: there is a program for each chunk that the table has room
    for, and those behind a row's end return at once.
    """
    (batch, heads, _, dim), (rows, most) = q.shape, pages.table.shape
    page, width = pages.keys.shape[1], pages.channels[1]
    slots, group, lengths = most * page, batch * heads // rows, pages.lengths.contiguous()
    chunk = 32 if interpreting() else max(256, triton.next_power_of_2(rows * slots // CHUNKS + 1))
    chunks = triton.cdiv(slots, chunk)
    partial = torch.empty(rows * chunks, group, width, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows * chunks, group, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, heads, 1, width, dtype=q.dtype, device=q.device)
    longest = 0 if weights is None else slots
    if chunks:
        SPLIT(
            lambda meta: (rows * chunks,),
            *(q.contiguous(), pages.keys.contiguous(), pages.values.contiguous(), pages.table, lengths, partial, lse),
            *(weights, scaling * LOG2E, pages.table.stride(0), chunk, chunks, size_class(slots), longest, group),
            *(padded(group), dim, padded(dim), width, padded(width), page, pages.format is not None, cap2(softmax)),
        )
    piece = 16 if interpreting() else PIECE
    pieces = max(1, triton.cdiv(longest, piece))
    with torch.cuda.device_of(q):
        combine[(rows * group * pieces,)](
            *(partial, lse, lengths, out, weights, logits2(softmax.sinks), chunk, max(chunks, 1), longest, pieces),
            *(group, 1, heads, width, padded(width), 32, piece),
        )
    return out
