"""Gated prefill in Triton: kept keys are read by a list of their positions, evicted keys only on the diagonal."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ag.kernels.gated_attention.masks import Masks
from ag.kernels.gated_attention.triton import attend
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
    readable,
    size_class,
    softmax_start,
    softmax_update,
    store_rows,
    tuned,
)


@triton.jit
def _load_listed(base, stride, columns, inside, D: tl.constexpr, DP: tl.constexpr):
    """Load the rows ``columns`` of a ``[T, D]`` tensor; rows that are not ``inside`` are zeros."""
    dims = tl.arange(0, DP)
    mask = inside[:, None]
    if D < DP:
        mask = mask & (dims < D)[None, :]
    return tl.load(base + columns.to(tl.int64)[:, None] * stride + dims[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["T", "size", "recent"])
def _prefill(q, k, v, out, q_strides, k_strides, v_strides, out_strides, gate, padding, kept, kept_before, scale,
             recent, window, T, size, H, G, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
             KEYS: tl.constexpr, sinks, ROWS: tl.constexpr):  # fmt: skip
    """Attend from one block of queries of one head: to kept keys before the protected keys, then to all later keys."""
    block, pair = program_tile(T, ROWS)
    start = (tl.cdiv(T, ROWS) - 1 - block) * ROWS
    b, h = pair // H, pair % H
    k, v = head_pointer(k, k_strides, b, h // G), head_pointer(v, v_strides, b, h // G)
    if padding is not None:
        padding += tl.cast(b, tl.int64) * T
    row = tl.cast(pair // G, tl.int64)
    gate += row * T
    kept += row * T
    kept_before += row * (T + 1)
    masked_start, oldest = tl.maximum(start - recent + 1, 0) // KEYS, start * 0
    if window is not None:
        oldest = tl.maximum(start - window + 1, 0)
        masked_start = tl.maximum(masked_start, oldest // KEYS)
    first, last = tl.load(kept_before + oldest), tl.load(kept_before + masked_start * KEYS)
    rows = start + tl.arange(0, ROWS)
    queries = load_rows(head_pointer(q, q_strides, b, h), q_strides[2], start, T, ROWS, D, DP)
    total, largest = softmax_start(sinks, h, ROWS)
    mixed = tl.zeros([ROWS, EP], tl.float32)
    for i in range(first, last, KEYS):
        inside = i + tl.arange(0, KEYS) < last
        columns = tl.load(kept + i + tl.arange(0, KEYS), mask=inside, other=0)
        keys = _load_listed(k, k_strides[2], columns, inside, D, DP)
        s = tl.dot(queries, tl.trans(keys), input_precision=FLOAT32) * scale
        s = tl.where(inside[None, :], s, float("-inf"))
        if window is not None:
            s = tl.where(rows[:, None] - columns[None, :] < window, s, float("-inf"))
        total, largest, mixed = softmax_update(
            s, _load_listed(v, v_strides[2], columns, inside, E, EP), total, largest, mixed
        )
    for n in range(masked_start, tl.cdiv(tl.minimum(start + ROWS, T), KEYS)):
        total, largest, mixed = attend(queries, k, v, k_strides[2], v_strides[2], total, largest, mixed, scale, start,
                                       n, gate, padding, None, recent, window, T, ROWS, KEYS, D, DP, E, EP,
                                       True)  # fmt: skip
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    store_rows(head_pointer(out, out_strides, b, h), out_strides[2], start, T, mixed, ROWS, E, EP)


PREFILL = tuned(["D", "E", "size", "window"], ROWS, 2**15, ROWS=16)(_prefill)


@torch.compiler.disable
def gated_prefill(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, masks: Masks, scaling: float, softmax: Softmax = PLAIN
) -> Tensor:
    """Compute :func:`ag.kernels.gated_prefill.gated_prefill`; only kept pairs and the diagonal are computed.

    A list ``[B, Hkv, T]`` has the positions of the kept keys. A table ``[B, Hkv, T]`` counts the kept keys before each
    position. The host therefore does not synchronise.
    """
    q, k, v = (readable(x) for x in (q, k, v))
    batch, heads, length, dim = q.shape
    recent, window = min(masks.recent, length), masks.window
    window = None if window is None or window >= length else window
    stays = keep | masks.sink(k)[:, None]
    if masks.key_valid is not None:
        stays = stays & masks.key_valid[:, None]
    stays = stays.contiguous()  # flags are transposed, and the tables below keep an argument's strides
    gate = torch.zeros(stays.shape, dtype=torch.float32, device=q.device).masked_fill_(~stays, float("-inf"))
    kept = stays.to(torch.uint8).argsort(stable=True, dim=-1, descending=True).int()
    kept_before = nn.functional.pad(stays.cumsum(-1), (1, 0)).int()
    out = torch.empty_like(q) if v.shape[-1] == dim else q.new_empty(*q.shape[:3], v.shape[-1])
    block = key_block(max(q, v, key=lambda x: x.shape[-1]))
    padding = padding_bias(masks.key_valid)
    with torch.cuda.device_of(q):
        PREFILL[lambda meta: (triton.cdiv(length, meta["ROWS"]) * batch * heads,)](
            *(q, k, v, out, *(x.stride()[:3] for x in (q, k, v, out)), gate, padding, kept, kept_before),
            *(scaling * LOG2E, recent, window, length, size_class(length), heads, heads // k.shape[1]),
            *(dim, padded(dim), v.shape[-1], padded(v.shape[-1]), block, logits2(softmax.sinks)),
        )
    return out
