"""Decoding over ragged rows in Triton: rows are split into chunks, so that few long rows fill the card too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ag.kernels.dispatch import interpreting
from ag.kernels.tiles import FLOAT32, load_rows, mix
from ag.kernels.tuned import LOG2E, Tuned, padded, readable, size_class

CHUNKS = 512  # about how many chunks the whole storage is cut into: a few for each processor of a card
PIECE = 1024  # weights that a program normalises


@triton.jit(do_not_specialize=["chunk", "size", "N"])
def _split(q, keys, values, starts, lengths, owners, before, partial, lse, weights, k_stride, v_stride, scale, chunk,
           size, N, R, G, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
           ROWS: tl.constexpr):  # fmt: skip
    """Attend from the G queries of a row to one chunk of it; chunks beyond the last have no owner and hold nothing.

    Where somebody wants the ``weights``, their places get the logits, which the other kernel normalises.
    """
    item = tl.cast(tl.program_id(0), tl.int64)
    owner = tl.load(owners + item)
    row = tl.minimum(owner, R - 1)
    count = tl.where(owner < R, tl.load(lengths + row), 0)
    first = (item - tl.load(before + row)) * chunk
    stop = tl.minimum(first + chunk, count)
    keys += tl.load(starts + row) * k_stride
    values += tl.load(starts + row) * v_stride
    queries = load_rows(q + row * G * D, D, 0, G, GP, D, DP)
    heads, slots = tl.arange(0, GP), tl.arange(0, ROWS)
    total, largest = tl.zeros([GP], tl.float32), tl.full([GP], float("-inf"), tl.float32)
    mixed = tl.zeros([GP, EP], tl.float32)
    for n in range(first, stop, ROWS):
        s = tl.dot(queries, tl.trans(load_rows(keys, k_stride, n, stop, ROWS, D, DP)), input_precision=FLOAT32) * scale
        s = tl.where((n + slots < stop)[None, :], s, float("-inf"))
        if weights is not None:
            mask = (heads < G)[:, None] & (n + slots < tl.minimum(stop, N))[None, :]
            tl.store(weights + (row * G + heads)[:, None] * N + (n + slots)[None, :], s, mask=mask)
        tile = load_rows(values, v_stride, n, stop, ROWS, E, EP)
        total, largest, mixed = mix(s, tile, total, largest, mixed)
    dims = tl.arange(0, EP)
    empty = total == 0.0
    mixed = mixed / tl.where(empty, 1.0, total)[:, None]
    mask = (heads < G)[:, None] & (dims < E)[None, :]
    tl.store(partial + item * G * E + heads[:, None] * E + dims[None, :], mixed, mask=mask)
    sums = tl.where(empty, float("-inf"), largest + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + item * G + heads, sums, mask=heads < G)


@triton.jit(do_not_specialize=["N", "pieces"])
def _combine(partial, lse, before, lengths, out, weights, N, pieces, G, E: tl.constexpr, EP: tl.constexpr,
             CHUNKS: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Mix the chunks of one query; a row without tokens gives 0.

    Of the ``weights`` of a query each of its programs normalises a piece of SLOTS; the first one makes the output.
    """
    query, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    row, head = query // G, query % G
    dims, width = tl.arange(0, EP), tl.where(piece == 0, E, 0)
    first, stop = tl.load(before + row), tl.load(before + row + 1)
    total, largest, mixed = 0.0, float("-inf"), tl.zeros([EP], tl.float32)
    for n in range(first, stop, CHUNKS):
        items = n + tl.arange(0, CHUNKS)
        sums = tl.load(lse + items * G + head, mask=items < stop, other=float("-inf"))
        larger = tl.maximum(largest, tl.max(sums, 0))
        weight = tl.exp2(sums - larger)
        shrink = tl.exp2(largest - larger)
        mask = (items < stop)[:, None] & (dims < width)[None, :]
        tile = tl.load(partial + (items * G + head)[:, None] * E + dims[None, :], mask=mask, other=0.0)
        mixed = mixed * shrink + tl.sum(tile * weight[:, None], 0)
        total, largest = total * shrink + tl.sum(weight, 0), larger
    empty = total == 0.0
    total, largest = tl.where(empty, 1.0, total), tl.where(empty, 0.0, largest)
    at = out + tl.cast(query, tl.int64) * E + dims
    tl.store(at, (mixed / total).to(out.dtype.element_ty), mask=dims < width)
    if weights is not None:
        slots = piece * SLOTS + tl.arange(0, SLOTS)
        weights += tl.cast(query, tl.int64) * N
        logits = tl.load(weights + slots, mask=slots < tl.load(lengths + row), other=float("-inf"))
        tl.store(weights + slots, tl.exp2(logits - largest) / total, mask=slots < N)


SPLIT = Tuned(_split, ["GP", "D", "E", "size"])


@torch.compiler.disable
def triton_ragged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scaling: float,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute :func:`ag.kernels.ragged_decode.ragged_decode` on the card, which is never waited for.

    The attention weights go into ``weights`` ``[B, H, N]`` float32, contiguous, where somebody wants them.

    How many tokens the rows hold is known to the card alone: the list of chunks is made there, and as long as the flat
    buffer, in which rows do not overlap, could need.
    """
    keys, values = readable(keys), readable(values)
    starts, lengths = starts.contiguous(), lengths.contiguous()
    batch, heads, dim = q.shape
    rows, slots, width, longest = len(starts), len(keys), values.shape[1], 0 if weights is None else weights.shape[-1]
    group = batch * heads // rows
    chunk = 32 if interpreting() else max(256, triton.next_power_of_2(slots // CHUNKS + 1))
    items = slots // chunk + rows
    before = nn.functional.pad(((lengths + chunk - 1) // chunk).cumsum(0), (1, 0))
    owners = torch.searchsorted(before[1:], torch.arange(items, device=q.device), right=True)
    partial = torch.empty(items, group, width, dtype=torch.float32, device=q.device)
    lse = torch.empty(items, group, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, heads, width, dtype=q.dtype, device=q.device)
    SPLIT(
        lambda meta: (items,),
        *(q.contiguous(), keys, values, starts, lengths, owners, before, partial, lse, weights),
        *(keys.stride(0), values.stride(0), scaling * LOG2E, chunk, size_class(slots), longest),
        *(rows, group, padded(group)),
        *(dim, padded(dim), width, padded(width)),
    )
    piece = 16 if interpreting() else PIECE
    pieces = max(1, triton.cdiv(longest, piece))
    with torch.cuda.device_of(q):
        _combine[(rows * group * pieces,)](
            *(partial, lse, before, lengths, out, weights, longest, pieces, group, width, padded(width), 32, piece)
        )
    return out
