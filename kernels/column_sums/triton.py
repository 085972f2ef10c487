"""Column sums and maxima in Triton: one pass for the row sums, one over the keys, gathering in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ag.kernels.tiles import FLOAT32, at, load_rows, ranges, turn, weights
from ag.kernels.tuned import LOG2E, Tuned, key_block, padded, padding_bias, readable, size_class


@triton.jit
def _take(q, k, k_stride, total, largest, scale, start, n, padding, window, T, ROWS: tl.constexpr, KEYS: tl.constexpr,
          D: tl.constexpr, DP: tl.constexpr, NEAR: tl.constexpr):  # fmt: skip
    """Take one block of keys into the running row sums."""
    keys = load_rows(k, k_stride, n * KEYS, T, KEYS, D, DP)
    s = tl.dot(q, tl.trans(keys), input_precision=FLOAT32) * scale
    s += weights(start, n, None, padding, None, 1, window, T, ROWS, KEYS, NEAR)
    larger = tl.maximum(largest, tl.max(s, 1))
    finite = tl.where(larger == float("-inf"), 0.0, larger)
    return total * tl.exp2(largest - finite) + tl.sum(tl.exp2(s - finite[:, None]), 1), larger


@triton.jit(do_not_specialize=["M", "T", "size"])
def _row_sums(q, k, lse, queries, q_strides, k_strides, padding, scale, window, M, T, size, H, G, D: tl.constexpr,
              DP: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Write the log2 of the row sums of a block of queries; where one does not count infinity, so weights of 0.

    The queries are those of the last M of T tokens: query 0 has the place T - M.
    """
    block, pair = turn(M, ROWS)
    first = (tl.cdiv(M, ROWS) - 1 - block) * ROWS
    start = T - M + first
    b, h = pair // H, pair % H
    k = at(k, k_strides, b, h // G)
    if padding is not None:
        padding += tl.cast(b, tl.int64) * T
    rows = first + tl.arange(0, ROWS)
    counted = tl.load(queries + tl.cast(b, tl.int64) * M + rows, mask=rows < M, other=0)
    far, far_stop, near, stop, _ = ranges(start, None, None, 1, window, T, ROWS, KEYS)
    needed = tl.max(counted.to(tl.int32), 0) > 0
    far_stop, stop = tl.where(needed, far_stop, far), tl.where(needed, stop, near)
    tile = load_rows(at(q, q_strides, b, h), q_strides[2], first, M, ROWS, D, DP)
    total, largest = tl.zeros([ROWS], tl.float32), tl.full([ROWS], float("-inf"), tl.float32)
    for n in range(far, far_stop):
        total, largest = _take(tile, k, k_strides[2], total, largest, scale, start, n, padding, window, T, ROWS, KEYS,
                               D, DP, False)  # fmt: skip
    for n in range(near, stop):
        total, largest = _take(tile, k, k_strides[2], total, largest, scale, start, n, padding, window, T, ROWS, KEYS,
                               D, DP, True)  # fmt: skip
    blind = (total == 0.0) | (counted == 0)
    sums = tl.where(blind, float("inf"), largest + tl.log2(tl.where(blind, 1.0, total)))
    tl.store(lse + tl.cast(pair, tl.int64) * M + rows, sums, mask=rows < M)


@triton.jit(do_not_specialize=["M", "T", "size", "skip"])
def _columns(q, k, lse, out, bounds, q_strides, k_strides, padding, scale, power, skip, window, M, T, size, H, G,
             D: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, LARGEST: tl.constexpr,
             ROWS: tl.constexpr):  # fmt: skip
    """Write what one head pays each of a block of keys, in all or at most."""
    block, pair = turn(T, KEYS)
    start = block * KEYS
    b, h = pair // H, pair % H
    columns = start + tl.arange(0, KEYS)
    keys = load_rows(at(k, k_strides, b, h // G), k_strides[2], start, T, KEYS, D, DP)
    q = at(q, q_strides, b, h)
    lse += tl.cast(pair, tl.int64) * M
    ahead = T - M  # tokens before the first query
    first = tl.maximum(start + skip - ahead, tl.load(bounds + 2 * b)) // ROWS * ROWS
    stop = tl.minimum(M, tl.load(bounds + 2 * b + 1))
    if window is not None:
        stop = tl.minimum(stop, start + KEYS - 1 + window - ahead)
    paid = tl.full([KEYS], float("-inf") if LARGEST else 0.0, tl.float32)
    for m in range(first, stop, ROWS):
        rows = m + tl.arange(0, ROWS)
        tile = load_rows(q, q_strides[2], m, M, ROWS, D, DP)
        sums = tl.load(lse + rows, mask=rows < M, other=float("inf"))
        distance = ahead + rows[None, :] - columns[:, None]
        counted = distance >= skip
        if window is not None:
            counted &= distance < window
        exponent = tl.dot(keys, tl.trans(tile), input_precision=FLOAT32) * scale - sums[None, :]
        if LARGEST:
            paid = tl.maximum(paid, tl.max(tl.where(counted, exponent, float("-inf")), 1))
        else:
            paid += tl.sum(tl.where(counted, tl.exp2(exponent * power), 0.0), 1)
    if LARGEST:
        paid = tl.exp2(paid)
    if padding is not None:
        hidden = tl.load(padding + tl.cast(b, tl.int64) * T + columns, mask=columns < T, other=0.0) < 0.0
        paid = tl.where(hidden, 0.0, paid)
    tl.store(out + tl.cast(pair, tl.int64) * T + columns, paid, mask=columns < T)


ROW_SUMS, COLUMNS = Tuned(_row_sums, ["D", "size"]), Tuned(_columns, ["D", "size", "LARGEST"])


def columns(
    q: Tensor,
    k: Tensor,
    scaling: float,
    queries: Tensor,
    key_valid: Tensor | None,
    window: int | None,
    *,
    power: int = 1,
    skip: int = 0,
    largest: bool = False,
    factors: Tensor | None = None,
) -> Tensor:
    """Return the sum, or the ``largest``, of the weights of each column, ``[B, H, T]`` float32.

    The other arguments are those of column sums, and the ``factors`` of column maxima.
    """
    q, k = readable(q), readable(k)
    batch, heads, count, dim = q.shape
    length = k.shape[2]
    window = None if window is None or window >= length else window
    padding = padding_bias(key_valid)
    lse, out = (torch.empty(batch, heads, n, dtype=torch.float32, device=q.device) for n in (count, length))
    index = torch.arange(count, device=q.device)
    bounds = torch.stack([torch.where(queries, index, count).amin(1), torch.where(queries, index + 1, 0).amax(1)], 1)
    strides = q.stride()[:3], k.stride()[:3]
    sizes = (count, length, size_class(length), heads, heads // k.shape[1], dim, padded(dim), key_block(q))
    scale = scaling * LOG2E
    ROW_SUMS(
        lambda meta: (triton.cdiv(count, meta["ROWS"]) * batch * heads,),
        *(q, k, lse, queries.to(torch.int8).contiguous(), *strides, padding, scale, window, *sizes),
    )
    if factors is not None:
        lse -= factors.float().log2()[:, None]  # infinite sums stay so, and a factor of 0 makes more of them
    COLUMNS(
        lambda meta: (triton.cdiv(length, meta["KEYS"]) * batch * heads,),
        *(q, k, lse, out, bounds.int(), *strides, padding, scale, float(power), skip, window, *sizes, largest),
    )
    return out


@torch.compiler.disable
def triton_column_sums(
    q: Tensor,
    k: Tensor,
    scaling: float,
    queries: Tensor,
    key_valid: Tensor | None = None,
    window: int | None = None,
    power: int = 1,
    skip: int = 0,
    mean: bool = False,
) -> Tensor:
    """Compute :func:`ag.kernels.column_sums.column_sums` with ``O(B H T)`` memory."""
    out = columns(q, k, scaling, queries, key_valid, window, power=power, skip=skip)
    if mean:
        count, length = q.shape[2], k.shape[2]
        index = torch.arange(length, device=q.device) - (length - count)  # of the query at the same place
        before = nn.functional.pad(queries.cumsum(1), (1, 0))
        first, stop = ((index + more).clamp(0, count) for more in (skip, min(window or length, length)))
        out /= (before[:, stop] - before[:, first])[:, None].clamp_min(1)
    return out
