"""Statistics of attention in Triton: one pass computes row sums, a second pass reduces over queries in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ag.kernels.attention_stats.reference import STATISTICS, Kind
from ag.kernels.dispatch import INTERPRETED
from ag.kernels.softmax import PLAIN, Softmax
from ag.kernels.tiles import (
    FLOAT32,
    LOG2E,
    ROWS,
    cap2,
    cap_logits,
    head_pointer,
    key_block,
    load_rows,
    logits2,
    padded,
    program_tile,
    readable,
    size_class,
    softmax_start,
    tuned,
)

NEWEST = torch.iinfo(torch.int32).max
SUM, MAX = tl.constexpr(STATISTICS.index("sum")), tl.constexpr(STATISTICS.index("max"))


@triton.jit
def _meeting(lows, highs, spans, low, high, COUNT: tl.constexpr):
    """Return the first span of tokens that has token indices in ``[low, high]``, and one past the last."""
    first, stop = spans + 0, spans * 0
    for n in range(0, spans, COUNT):
        number = n + tl.arange(0, COUNT)
        valid = number < spans
        meets = valid & (tl.load(lows + number, mask=valid, other=0) <= high)
        meets = meets & (tl.load(highs + number, mask=valid, other=-1) >= low)
        first = tl.minimum(first, tl.min(tl.where(meets, number, spans), 0))
        stop = tl.maximum(stop, tl.max(tl.where(meets, number + 1, 0), 0))
    return first, stop


@triton.jit
def _limits(token_index):
    """Return the smallest and the largest token index that is not below 0."""
    return tl.min(tl.where(token_index < 0, 2147483647, token_index), 0), tl.max(token_index, 0)


@triton.jit(do_not_specialize=["M", "N", "size", "spans"])
def _row_sums(q, k, lse, query_indices, key_indices, lows, highs, sinks, q_strides, k_strides, scale, cap, window, M, N,
              size, spans, H, G, HR, D: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
              COUNT: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Write the log2 of the row sums of a block of queries; infinity (weight 0) if a query does not count."""
    block, pair = program_tile(M, ROWS)
    b, h = pair // H, pair % H
    of_indices = tl.cast(b * HR + h // G % HR, tl.int64)
    k, key_indices = head_pointer(k, k_strides, b, h // G), key_indices + of_indices * N
    rows = block * ROWS + tl.arange(0, ROWS)
    query_index = tl.load(query_indices + tl.cast(b, tl.int64) * M + rows, mask=rows < M, other=-1)
    oldest, newest = _limits(query_index)
    if window is not None:
        oldest -= window - 1
    else:
        oldest *= 0
    first, stop = _meeting(lows + of_indices * spans, highs + of_indices * spans, spans, oldest, newest, COUNT)
    tile = load_rows(head_pointer(q, q_strides, b, h), q_strides[2], block * ROWS, M, ROWS, D, DP)
    total, largest = softmax_start(sinks, h, ROWS)
    for n in range(first * SPAN, tl.minimum(stop * SPAN, N), KEYS):
        columns = n + tl.arange(0, KEYS)
        key_index = tl.load(key_indices + columns, mask=columns < N, other=-1)[None, :]
        s = tl.dot(tile, tl.trans(load_rows(k, k_strides[2], n, N, KEYS, D, DP)), input_precision=FLOAT32) * scale
        visible = (key_index >= 0) & (key_index <= query_index[:, None])
        if window is not None:
            visible = visible & (key_index > query_index[:, None] - window)
        s = tl.where(visible, cap_logits(s, cap), float("-inf"))
        larger = tl.maximum(largest, tl.max(s, 1))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp2(largest - finite) + tl.sum(tl.exp2(s - finite[:, None]), 1)
        largest = larger
    blind = (total == 0.0) | (query_index < 0)
    sums = tl.where(blind, float("inf"), largest + tl.log2(tl.where(blind, 1.0, total)))
    tl.store(lse + tl.cast(pair, tl.int64) * M + rows, sums, mask=rows < M)


@triton.jit
def _larger(a, b):
    """Return the larger number, or NaN if one is NaN, which ``tl.max`` leaves out."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["M", "N", "size", "spans", "skip"])
def _columns(q, k, lse, out, query_indices, key_indices, lows, highs, q_strides, k_strides, scale, cap, window, skip, M,
             N, size, spans, H, G, HR, D: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
             COUNT: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Write the statistics of a block of keys for one query head."""
    block, pair = program_tile(N, KEYS)
    b, h = pair // H, pair % H
    columns = block * KEYS + tl.arange(0, KEYS)
    key_index = tl.load(key_indices + tl.cast(b * HR + h // G % HR, tl.int64) * N + columns, mask=columns < N, other=-1)
    keys = load_rows(head_pointer(k, k_strides, b, h // G), k_strides[2], block * KEYS, N, KEYS, D, DP)
    q, query_indices = head_pointer(q, q_strides, b, h), query_indices + tl.cast(b, tl.int64) * M
    lse += tl.cast(pair, tl.int64) * M
    oldest, newest = _limits(key_index)
    last = newest * 0 + 2147483647
    if window is not None:
        last = tl.minimum(newest, 2147483647 - window) + window - 1
    first, stop = _meeting(lows + b * spans, highs + b * spans, spans, oldest, last, COUNT)
    stop = tl.where(newest < 0, first, stop)
    paid = tl.full([KEYS], float("-inf") if KIND == MAX else 0.0, tl.float32)
    for m in range(first * SPAN // ROWS * ROWS, tl.minimum(stop * SPAN, M), ROWS):
        rows = m + tl.arange(0, ROWS)
        tile = load_rows(q, q_strides[2], m, M, ROWS, D, DP)
        sums = tl.load(lse + rows, mask=rows < M, other=float("inf"))
        query_index = tl.load(query_indices + rows, mask=rows < M, other=-1)[None, :]
        counted = (key_index >= 0)[:, None] & (key_index[:, None] <= query_index - skip)
        if window is not None:
            counted = counted & (key_index[:, None] > query_index - window)
        s = tl.dot(keys, tl.trans(tile), input_precision=FLOAT32) * scale
        exponent = cap_logits(s, cap) - sums[None, :]
        if KIND == MAX:
            paid = _larger(paid, tl.reduce(tl.where(counted, exponent, float("-inf")), 1, _larger))
        else:
            if KIND != SUM:
                exponent *= 2.0
            paid += tl.sum(tl.where(counted, tl.exp2(exponent), 0.0), 1)
    if KIND == MAX:
        paid = tl.exp2(paid)
    tl.store(out + tl.cast(pair, tl.int64) * N + columns, paid, mask=columns < N)


ROW_SUMS = tuned(["D", "size", "window"], ROWS, 2**15, ROWS=16)(_row_sums)
COLUMNS = tuned(["D", "size", "window", "KIND"], ROWS, 2**15, ROWS=16)(_columns)


def _spans(token_indices: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest token index of each ``span`` tokens of ``[R, N]``, int32 ``[R, spans]``."""
    tokens = nn.functional.pad(token_indices, (0, -token_indices.shape[1] % span), value=-1).unflatten(1, (-1, span))
    return tokens.masked_fill(tokens < 0, NEWEST).amin(2), tokens.amax(2)


@torch.compiler.disable
def attention_stats(
    kind: Kind,
    q: Tensor,
    k: Tensor,
    query_indices: Tensor,
    key_indices: Tensor,
    scaling: float,
    window: int | None = None,
    skip: int = 0,
    factors: Tensor | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Compute :func:`ag.kernels.attention_stats.attention_stats` with ``O(B H (M + N))`` memory."""
    q, k = readable(q), readable(k)
    (batch, heads, count, dim), (_, kv_heads, length, _) = q.shape, k.shape
    query_indices, key_indices = query_indices.int().contiguous(), key_indices.int().contiguous()
    lse = torch.empty(batch, heads, count, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    strides, span = (q.stride()[:3], k.stride()[:3]), 16 if INTERPRETED else 64
    size, block = size_class(length), key_block(q)
    of_keys, of_queries = _spans(key_indices.flatten(0, 1), span), _spans(query_indices, span)
    sizes = (heads, heads // kv_heads, key_indices.shape[1], dim, padded(dim), block, span, 128)
    scale, cap = scaling * LOG2E, cap2(softmax.cap)
    with torch.cuda.device_of(q):
        ROW_SUMS[lambda meta: (triton.cdiv(count, meta["ROWS"]) * batch * heads,)](
            *(q, k, lse, query_indices, key_indices, *of_keys, logits2(softmax.sinks), *strides, scale, cap, window),
            *(count, length, size, of_keys[0].shape[1], *sizes),
        )
        if factors is not None:
            lse -= factors.float().log2()[:, None]  # a factor of 0 makes a sum infinite too
        COLUMNS[lambda meta: (triton.cdiv(length, block) * batch * heads,)](
            *(q, k, lse, out, query_indices, key_indices, *of_queries, *strides, scale, cap, window, skip),
            *(count, length, size, of_queries[0].shape[1], *sizes, STATISTICS.index(kind)),
        )
    return out
