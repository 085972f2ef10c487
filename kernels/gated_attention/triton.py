"""Gated attention fused in Triton in the style of flash attention: it stores the output and one number a query.

A query-major kernel computes the output, a second one dQ. A key-major kernel computes dK, dV and the gradient of the
flags. No sum needs an atomic addition, and every run gives equal bits. All logits and sums are in base 2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ag.kernels.gated_attention.chunked import sink_gradient
from ag.kernels.gated_attention.masks import Masks
from ag.kernels.softmax import PLAIN, Softmax
from ag.kernels.tiles import (
    FLOAT32,
    LOG2E,
    ROWS,
    head_pointer,
    key_block,
    load_rows,
    logits2,
    padded,
    padding_bias,
    program_tile,
    ranges,
    readable,
    shape,
    size_class,
    softmax_start,
    softmax_update,
    store_rows,
    tuned,
    weights,
)


@triton.jit
def attend(q, k, v, k_stride, v_stride, total, largest, mixed, scale, start, n, gate, padding, dense, recent, window,
           T, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr,
           EP: tl.constexpr, MASKED: tl.constexpr, floor=None):  # fmt: skip
    """Add one block of keys to the running softmax."""
    keys = load_rows(k, k_stride, n * KEYS, T, KEYS, D, DP)
    s = tl.dot(q, tl.trans(keys), input_precision=FLOAT32) * scale
    s += weights(start, n, gate, padding, dense, recent, window, T, ROWS, KEYS, MASKED, floor)
    return softmax_update(s, load_rows(v, v_stride, n * KEYS, T, KEYS, E, EP), total, largest, mixed)


@triton.jit(do_not_specialize=["T", "size", "recent"])
def _forward(q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, gate, padding, dense_until, floors,
             listing, kept_before, scale, recent, window, T, size, H, G, D: tl.constexpr, DP: tl.constexpr,
             E: tl.constexpr, EP: tl.constexpr, KEYS: tl.constexpr, sinks, ROWS: tl.constexpr):  # fmt: skip
    """Attend from one block of queries of one head; the blocks with most keys run first."""
    block, pair = program_tile(T, ROWS)
    start = (tl.cdiv(T, ROWS) - 1 - block) * ROWS
    rows = start + tl.arange(0, ROWS)
    b, h = pair // H, pair % H
    group = h // G
    k, v = head_pointer(k, k_strides, b, group), head_pointer(v, v_strides, b, group)
    if padding is not None:
        padding += tl.cast(b, tl.int64) * T
    dense = None
    if dense_until is not None:
        dense = tl.load(dense_until + b)
    floor = None
    if floors is not None:
        floors += tl.cast(b, tl.int64) * T
        floor = tl.load(floors + rows, mask=rows < T, other=0)
    if gate is not None:
        row, blocks = tl.cast(pair // G, tl.int64), tl.cdiv(T, KEYS)
        gate += row * T
        listing += row * blocks
        kept_before += row * (blocks + 1)
    queries = load_rows(head_pointer(q, q_strides, b, h), q_strides[2], start, T, ROWS, D, DP)
    total, largest = softmax_start(sinks, h, ROWS)
    mixed = tl.zeros([ROWS, EP], tl.float32)
    unmasked_start, unmasked_stop, masked_start, stop, listed = ranges(
        start, kept_before, dense, recent, window, T, ROWS, KEYS, floors
    )
    for i in range(unmasked_start, unmasked_stop):
        n = i
        if gate is not None:
            n = tl.where(listed, tl.load(listing + i), i)
        total, largest, mixed = attend(queries, k, v, k_strides[2], v_strides[2], total, largest, mixed, scale, start,
                                       n, gate, padding, dense, recent, window, T, ROWS, KEYS, D, DP, E, EP,
                                       False, floor)  # fmt: skip
    for n in range(masked_start, stop):
        total, largest, mixed = attend(queries, k, v, k_strides[2], v_strides[2], total, largest, mixed, scale, start,
                                       n, gate, padding, dense, recent, window, T, ROWS, KEYS, D, DP, E, EP,
                                       True, floor)  # fmt: skip
    blind = total == 0.0
    mixed = mixed / tl.where(blind, 1.0, total)[:, None]
    store_rows(head_pointer(out, out_strides, b, h), out_strides[2], start, T, mixed, ROWS, E, EP)
    # A query that sees nothing has an infinite sum: its exponentials in the backward pass are 0.
    sums = tl.where(blind, float("inf"), largest + tl.log2(tl.where(blind, 1.0, total)))
    tl.store(lse + tl.cast(pair, tl.int64) * T + rows, sums, mask=rows < T)


@triton.jit
def _slope(q, d_out, k, v, k_stride, v_stride, lse, delta, dq, scale, start, n, gate, padding, dense, recent, window, T,
           ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr,
           EP: tl.constexpr, MASKED: tl.constexpr, floor=None):  # fmt: skip
    """Add the part of one block of keys to dQ."""
    values = load_rows(v, v_stride, n * KEYS, T, KEYS, E, EP)
    slope = tl.dot(d_out, tl.trans(values), input_precision=FLOAT32) - delta[:, None]
    keys = load_rows(k, k_stride, n * KEYS, T, KEYS, D, DP)
    s = tl.dot(q, tl.trans(keys), input_precision=FLOAT32) * scale
    s += weights(start, n, gate, padding, dense, recent, window, T, ROWS, KEYS, MASKED, floor)
    p = tl.exp2(s - lse[:, None])
    return tl.dot((p * slope).to(keys.dtype), keys, dq, input_precision=FLOAT32)


@triton.jit(do_not_specialize=["T", "size", "recent"])
def _backward_queries(q, k, v, out, d_out, lse, delta, dq, q_strides, k_strides, v_strides, out_strides, d_out_strides,
                      dq_strides, gate, padding, dense_until, floors, listing, kept_before, scale, recent, window, T,
                      size, H, G, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
                      KEYS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Write dQ of one block of queries of one head, and ``delta = dO . o`` for the kernel of the keys."""
    block, pair = program_tile(T, ROWS)
    start = (tl.cdiv(T, ROWS) - 1 - block) * ROWS
    rows = start + tl.arange(0, ROWS)
    b, h = pair // H, pair % H
    group = h // G
    k, v = head_pointer(k, k_strides, b, group), head_pointer(v, v_strides, b, group)
    if padding is not None:
        padding += tl.cast(b, tl.int64) * T
    dense = None
    if dense_until is not None:
        dense = tl.load(dense_until + b)
    floor = None
    if floors is not None:
        floors += tl.cast(b, tl.int64) * T
        floor = tl.load(floors + rows, mask=rows < T, other=0)
    if gate is not None:
        row, blocks = tl.cast(pair // G, tl.int64), tl.cdiv(T, KEYS)
        gate += row * T
        listing += row * blocks
        kept_before += row * (blocks + 1)
    outputs = load_rows(head_pointer(out, out_strides, b, h), out_strides[2], start, T, ROWS, E, EP)
    d_outputs = load_rows(head_pointer(d_out, d_out_strides, b, h), d_out_strides[2], start, T, ROWS, E, EP)
    shift = tl.cast(pair, tl.int64) * T
    deltas = tl.sum(outputs.to(tl.float32) * d_outputs.to(tl.float32), 1)
    tl.store(delta + shift + rows, deltas, mask=rows < T)
    sums = tl.load(lse + shift + rows, mask=rows < T, other=float("inf"))
    queries = load_rows(head_pointer(q, q_strides, b, h), q_strides[2], start, T, ROWS, D, DP)
    grad = tl.zeros([ROWS, DP], tl.float32)
    unmasked_start, unmasked_stop, masked_start, stop, listed = ranges(
        start, kept_before, dense, recent, window, T, ROWS, KEYS, floors
    )
    for i in range(unmasked_start, unmasked_stop):
        n = i
        if gate is not None:
            n = tl.where(listed, tl.load(listing + i), i)
        grad = _slope(queries, d_outputs, k, v, k_strides[2], v_strides[2], sums, deltas, grad, scale, start, n, gate,
                      padding, dense, recent, window, T, ROWS, KEYS, D, DP, E, EP, False, floor)  # fmt: skip
    for n in range(masked_start, stop):
        grad = _slope(queries, d_outputs, k, v, k_strides[2], v_strides[2], sums, deltas, grad, scale, start, n, gate,
                      padding, dense, recent, window, T, ROWS, KEYS, D, DP, E, EP, True, floor)  # fmt: skip
    grad *= scale * 0.6931471805599453  # ln 2
    store_rows(head_pointer(dq, dq_strides, b, h), dq_strides[2], start, T, grad, ROWS, D, DP)


@triton.jit
def _pay(q, d_out, q_stride, d_out_stride, lse, delta, keys, values, dk, dv, dm, scale, start, n, weight, valid, dense,
         floors, recent, window, T, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
         E: tl.constexpr, EP: tl.constexpr, FLAGS: tl.constexpr, ONLY: tl.constexpr):  # fmt: skip
    """Add the part of one block of queries to dK, dV and, with ``FLAGS``, dM; tiles are ``[KEYS, ROWS]``."""
    rows, columns = start + tl.arange(0, ROWS)[None, :], n * KEYS + tl.arange(0, KEYS)[:, None]
    queries = load_rows(q, q_stride, start, T, ROWS, D, DP)
    d_outputs = load_rows(d_out, d_out_stride, start, T, ROWS, E, EP)
    sums = tl.load(lse + rows, mask=rows < T, other=float("inf"))
    visible = rows >= columns
    if window is not None:
        visible &= rows - columns < window
    if floors is not None:
        visible &= columns >= tl.load(floors + rows, mask=rows < T, other=0)
    if valid is not None:
        visible &= valid[:, None]
    exponent = tl.dot(keys, tl.trans(queries), input_precision=FLOAT32) * scale - sums
    if weight is not None:
        free = rows - columns >= recent
        if dense is not None:
            free &= rows >= dense
        # e^(s - lse) of an evicted key is at most 1: for an evicted attention sink it would be astronomical
        exponent = tl.where(free & (weight == 0.0)[:, None], tl.minimum(exponent, 0.0), exponent)
    p = tl.where(visible, tl.exp2(exponent), 0.0)
    if not ONLY:
        used = p
        if weight is not None:
            used = tl.where(free, p * weight[:, None], p)
        dv = tl.dot(used.to(d_outputs.dtype), d_outputs, dv, input_precision=FLOAT32)
    slope = tl.dot(values, tl.trans(d_outputs), input_precision=FLOAT32)
    paid = p * (slope - tl.load(delta + rows, mask=rows < T, other=0.0))
    if FLAGS:
        dm += tl.sum(tl.where(free, paid, 0.0), 1)
    if not ONLY:
        if weight is not None:
            paid = tl.where(free, paid * weight[:, None], paid)
        dk = tl.dot(paid.to(queries.dtype), queries, dk, input_precision=FLOAT32)
    return dk, dv, dm


@triton.jit(do_not_specialize=["T", "size", "recent"])
def _backward_keys(q, k, v, d_out, lse, delta, dk, dv, d_keep, q_strides, k_strides, v_strides, d_out_strides,
                   dk_strides, dv_strides, gate, padding, dense_until, floors, ends, kept_before, scale, recent, window,
                   T, size, H, G, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
                   BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Write dK, dV and the flags' gradient of a tile of keys, whole blocks, summed over its group's query heads."""
    n, pair = program_tile(T, KEYS)
    start, heads = n * KEYS, H // G
    b, head = pair // heads, pair % heads
    columns = start + tl.arange(0, KEYS)
    blocks: tl.constexpr = KEYS // BLOCK
    past = tl.minimum((n + 1) * blocks, tl.cdiv(T, BLOCK))  # of the tile's blocks, one past the last
    dense = None
    if dense_until is not None:
        dense = tl.load(dense_until + b)
    valid = None
    if padding is not None:
        valid = tl.load(padding + tl.cast(b, tl.int64) * T + columns, mask=columns < T, other=float("-inf")) == 0.0
    # Queries [first, stop) can see the block; from query `attended` on all of its keys are evicted.
    first, stop = start // ROWS * ROWS, T + 0
    if window is not None:
        stop = tl.minimum(T, start + KEYS - 1 + window)
    if floors is not None:
        floors += tl.cast(b, tl.int64) * T
        stop = tl.minimum(stop, tl.load(ends + b * tl.cdiv(T, BLOCK) + past - 1))
    attended, weight = stop, None
    row = tl.cast(pair, tl.int64)
    if gate is not None:
        weight = tl.exp2(tl.load(gate + row * T + columns, mask=columns < T, other=float("-inf")))
        kept_before += row * (tl.cdiv(T, BLOCK) + 1)
        protected = start + KEYS - 1 + recent
        if dense is not None:
            protected = tl.maximum(protected, dense)
        attended = tl.where(
            tl.load(kept_before + past) > tl.load(kept_before + n * blocks), stop, tl.minimum(stop, protected)
        )
    # whole tiles: the second loop begins where the first ends
    attended = first + tl.cdiv(attended - first, ROWS) * ROWS
    keys = load_rows(head_pointer(k, k_strides, b, head), k_strides[2], start, T, KEYS, D, DP)
    values = load_rows(head_pointer(v, v_strides, b, head), v_strides[2], start, T, KEYS, E, EP)
    key_grad, value_grad = tl.zeros([KEYS, DP], tl.float32), tl.zeros([KEYS, EP], tl.float32)
    flag_grad = tl.zeros([KEYS], tl.float32)
    steps = tl.cdiv(attended - first, ROWS)
    for i in range(0, G * steps):
        g, m = i // steps, first + i % steps * ROWS
        h = head * G + g
        shift = (row * G + g) * T
        key_grad, value_grad, flag_grad = _pay(
            head_pointer(q, q_strides, b, h), head_pointer(d_out, d_out_strides, b, h), q_strides[2],
            d_out_strides[2], lse + shift, delta + shift, keys, values, key_grad, value_grad, flag_grad, scale, m, n,
            weight, valid, dense, floors, recent, window, T, ROWS, KEYS, D, DP, E, EP, d_keep is not None,
            False)  # fmt: skip
    key_grad *= scale * 0.6931471805599453  # ln 2
    store_rows(head_pointer(dk, dk_strides, b, head), dk_strides[2], start, T, key_grad, KEYS, D, DP)
    store_rows(head_pointer(dv, dv_strides, b, head), dv_strides[2], start, T, value_grad, KEYS, E, EP)
    if d_keep is not None:
        # A second loop: the registers of the first gradients are free then.
        for g in range(G):
            h = head * G + g
            queries, d_outputs = head_pointer(q, q_strides, b, h), head_pointer(d_out, d_out_strides, b, h)
            shift = (row * G + g) * T
            for m in range(attended, stop, ROWS):
                flag_grad = _pay(
                    queries, d_outputs, q_strides[2], d_out_strides[2], lse + shift, delta + shift, keys, values,
                    0.0, 0.0, flag_grad, scale, m, n, weight, valid, dense, floors, recent, window, T, ROWS, KEYS,
                    D, DP, E, EP, True, True)[2]  # fmt: skip
        tl.store(d_keep + row * T + columns, flag_grad, mask=columns < T)


KEY = ["D", "E", "size", "window"]
FORWARD, QUERIES = (tuned(KEY, ROWS, 2**15, ROWS=16)(kernel) for kernel in (_forward, _backward_queries))
OF_KEYS = [shape(8, 2, ROWS=16, KEYS=128), shape(8, 2, ROWS=32, KEYS=64), shape(8, 1, ROWS=16, KEYS=64)]
OF_KEYS += [shape(8, 2, ROWS=32, KEYS=32), shape(8, 3, ROWS=16, KEYS=32), shape(4, 2, ROWS=16, KEYS=32)]
OF_KEYS += [shape(8, 1, ROWS=32, KEYS=16), shape(8, 1, ROWS=16, KEYS=16)]
KEYS = tuned(KEY, OF_KEYS, 2**14, ROWS=16, KEYS=32)(_backward_keys)


def _tables(
    keep: Tensor | None, masks: Masks, block: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the kernels' tables of the keys, of size ``O(B Hkv T)``.

    Returns:
        ``gate``: log2 of the flags, 0 on sinks, ``[B, Hkv, T]``; ``padding``: 0 or -inf on padding, ``[B, T]``;
        ``listing``: the blocks with a kept key, in order, then all further blocks, ``[B, Hkv, blocks]``;
        ``kept_before``: number of blocks with a kept key before each block, ``[B, Hkv, blocks + 1]``.
    """
    padding = padding_bias(masks.key_valid)
    if keep is None:
        return None, padding, None, None
    length = keep.shape[2]
    gate = keep.float().log2().masked_fill_(masks.sink(keep)[:, None], 0.0)
    if masks.key_valid is not None:
        gate.masked_fill_(~masks.key_valid[:, None], float("-inf"))
    alive = nn.functional.pad(gate > float("-inf"), (0, -length % block)).unflatten(-1, (-1, block)).any(-1)
    listing = alive.to(torch.uint8).argsort(stable=True, dim=-1, descending=True).int().contiguous()
    return gate.contiguous(), padding, listing, nn.functional.pad(alive.cumsum(-1), (1, 0)).int()


def _strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(x.stride()[:3] for x in tensors)


class _TritonGatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        sink_logits: Tensor | None,
        masks: Masks,
        scaling: float,
    ) -> Tensor:
        q, k, v = (readable(x) for x in (q, k, v))
        batch, heads, length, _ = q.shape
        _, recent, _, window, dense_until, first = masks
        recent, window = min(recent, length), None if window is None or window >= length else window
        block = key_block(max(q, v, key=lambda x: x.shape[-1]))
        tables = _tables(keep, masks, block)
        dense = None if dense_until is None or keep is None else dense_until.int().contiguous()
        floors = None if first is None else first.int().contiguous()
        out = torch.empty_like(q) if v.shape[-1] == q.shape[-1] else q.new_empty(*q.shape[:3], v.shape[-1])
        lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
        numbers = (scaling * LOG2E, recent if keep is not None else 1, window, length, size_class(length))
        sizes = (heads, heads // k.shape[1], q.shape[-1], padded(q.shape[-1]), v.shape[-1], padded(v.shape[-1]), block)
        gate, padding, listing, kept_before = tables
        with torch.cuda.device_of(q):
            FORWARD[lambda meta: (triton.cdiv(length, meta["ROWS"]) * batch * heads,)](
                *(q, k, v, out, lse, *_strides(q, k, v, out)),
                *(gate, padding, dense, floors, listing, kept_before, *numbers, *sizes, logits2(sink_logits)),
            )
        ctx.save_for_backward(q, k, v, out, lse, *tables, dense, floors, keep, sink_logits)
        ctx.constants = numbers, sizes, masks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, gate, padding, listing, kept_before, dense, floors, keep, sink_logits = ctx.saved_tensors
        numbers, sizes, masks = ctx.constants
        batch, heads, length, _ = q.shape
        d_out, d_sinks = readable(grads[0]), None
        if sink_logits is not None and ctx.needs_input_grad[4]:
            d_sinks = sink_gradient(sink_logits, lse / LOG2E, out, d_out)
        delta, dq, dk, dv = torch.empty_like(lse), torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        ends = None
        if floors is not None:  # for each block of keys, one past the last query that sees it
            last = torch.arange(sizes[-1] - 1, length + sizes[-1] - 1, sizes[-1], device=q.device, dtype=torch.int32)
            ends = torch.searchsorted(floors, last.expand(batch, -1).contiguous(), right=True, out_int32=True)
        d_keep = None
        if keep is not None and ctx.needs_input_grad[3]:
            d_keep = torch.empty(keep.shape, dtype=torch.float32, device=keep.device)
        with torch.cuda.device_of(q):
            QUERIES[lambda meta: (triton.cdiv(length, meta["ROWS"]) * batch * heads,)](
                *(q, k, v, out, d_out, lse, delta, dq, *_strides(q, k, v, out, d_out, dq)),
                *(gate, padding, dense, floors, listing, kept_before, *numbers, *sizes),
            )
            KEYS[lambda meta: (triton.cdiv(length, meta["KEYS"]) * batch * k.shape[1],)](
                *(q, k, v, d_out, lse, delta, dk, dv, d_keep, *_strides(q, k, v, d_out, dk, dv)),
                *(gate, padding, dense, floors, ends, kept_before, *numbers, *sizes),
            )
        if d_keep is not None:
            d_keep.masked_fill_(masks.sink(q)[:, None], 0.0)
            d_keep = d_keep.to(keep.dtype)
        return dq, dk, dv, d_keep, d_sinks, None, None


@torch.compiler.disable
def gated_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, masks: Masks, scaling: float, softmax: Softmax = PLAIN
) -> Tensor:
    """Compute :func:`ag.kernels.gated_attention.gated_attention` with ``O(B H T)`` memory beside its arguments.

    Blocks without a kept key are read only by the gradient of the flags. Sums run in float32. Products of float32
    arguments are as exact as float32, not as TF32 (:data:`ag.kernels.tiles.FLOAT32`).
    """
    out: Tensor = _TritonGatedAttention.apply(q, k, v, keep, softmax.sinks, masks, scaling)
    return out
