"""Column maxima in Triton: one pass for the row sums, one over the keys that keeps the largest weight in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ag.kernels.column_sums.triton import KEY, ROW_SUMS
from ag.kernels.tiles import at, load_rows, turn
from ag.kernels.tuned import LOG2E, Tuned, doublings, key_block, padded, padding_bias, readable


@triton.jit(do_not_specialize=["T", "size"])
def _maxima(q, k, lse, out, bounds, q_strides, k_strides, padding, scale, window, T, size, H, G, D: tl.constexpr,
            DP: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Write the largest weight that one head gives each of a block of keys."""
    block, pair = turn(T, KEYS)
    start = block * KEYS
    b, h = pair // H, pair % H
    columns = start + tl.arange(0, KEYS)
    keys = load_rows(at(k, k_strides, b, h // G), k_strides[2], start, T, KEYS, D, DP)
    q = at(q, q_strides, b, h)
    shift = tl.cast(pair, tl.int64) * T
    first = tl.maximum(start, tl.load(bounds + 2 * b)) // ROWS * ROWS
    stop = tl.minimum(T, tl.load(bounds + 2 * b + 1))
    if window is not None:
        stop = tl.minimum(stop, start + KEYS - 1 + window)
    largest = tl.full([KEYS], float("-inf"), tl.float32)
    for m in range(first, stop, ROWS):
        rows = m + tl.arange(0, ROWS)
        tile = load_rows(q, q_strides[2], m, T, ROWS, D, DP)
        sums = tl.load(lse + shift + rows, mask=rows < T, other=float("inf"))
        distance = rows[None, :] - columns[:, None]
        counted = distance >= 0
        if window is not None:
            counted &= distance < window
        exponent = tl.dot(keys, tl.trans(tile), input_precision="ieee") * scale - sums[None, :]
        largest = tl.maximum(largest, tl.max(tl.where(counted, exponent, float("-inf")), 1))
    if padding is not None:
        largest += tl.load(padding + tl.cast(b, tl.int64) * T + columns, mask=columns < T, other=0.0)
    tl.store(out + shift + columns, tl.exp2(largest), mask=columns < T)


MAXIMA = Tuned(_maxima, [(64, 4, 2), (64, 4, 3), (128, 8, 2), (128, 8, 3)], [(16, 4, 1), (32, 8, 1)], KEY)


@torch.compiler.disable
def triton_column_max(
    q: Tensor,
    k: Tensor,
    scaling: float,
    queries: Tensor,
    key_valid: Tensor | None = None,
    window: int | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """Compute :func:`ag.kernels.column_max.column_max` with ``O(B H T)`` memory."""
    q, k = readable(q), readable(k)
    batch, heads, length, dim = q.shape
    window = None if window is None or window >= length else window
    padding = padding_bias(key_valid)
    lse, out = (torch.empty(batch, heads, length, dtype=torch.float32, device=q.device) for _ in range(2))
    index = torch.arange(length, device=q.device)
    bounds = torch.stack([torch.where(queries, index, length).amin(1), torch.where(queries, index + 1, 0).amax(1)], 1)
    strides = q.stride()[:3], k.stride()[:3]
    sizes = (length, doublings(length), heads, heads // k.shape[1], dim, padded(dim), key_block(q))
    scale = scaling * LOG2E
    ROW_SUMS(
        lambda meta: (triton.cdiv(length, meta["ROWS"]) * batch * heads,),
        *(q, k, lse, queries.to(torch.int8).contiguous(), *strides, padding, scale, window, *sizes),
    )
    if factors is not None:
        lse -= factors.float().log2()[:, None]  # infinite sums stay so, and a factor of 0 makes more of them
    MAXIMA(
        lambda meta: (triton.cdiv(length, meta["KEYS"]) * batch * heads,),
        *(q, k, lse, out, bounds.int(), *strides, padding, scale, window, *sizes),
    )
    return out
