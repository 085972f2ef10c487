"""Functions that the Triton kernels share: shapes of tiles, loading and storing of rows, ranges of blocks, masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ag.kernels import codes
from ag.kernels.dispatch import INTERPRETED

LOG2E = 1.4426950408889634
TALLEST = 128  # rows of the largest tile
FARTHEST = (2**31 - 1) // TALLEST  # elements from one row to the next
CLASSES = (2048, 16384)  # tiles are timed once for lengths up to each limit, and once for longer ones
# How float32 tiles are multiplied on tensor cores; 16-bit tiles are not changed. A number a is split into two TF32
# numbers of 11 significant bits, a' and a'', with |a - a' - a''| <= 2^-22 |a|. A product is a'b' + a'b'' + a''b'; the
# term a''b'' is left out, at most 2^-22 |ab|. The error is at most 3 * 2^-22 |ab|, 6 roundings (2^-23). A sum of n
# products is wrong by at most (6 + n) 2^-23 sum |ab|: n, as for float32 operations in any order, and 6 more. The
# interpreter always multiplies in float32.
FLOAT32 = tl.constexpr("tf32x3")
GROUP = tl.constexpr(codes.GROUP)


def shape(warps: int, stages: int, **sizes: int) -> triton.Config:
    """Return a shape of tiles: their sizes, the warps of a program, and the tiles that are loaded ahead."""
    return triton.Config(sizes, num_warps=warps, num_stages=stages)


#: Tile shapes, the largest first, for kernels whose programs keep ROWS queries and loop over keys, or the reverse.
ROWS = [shape(8, 3, ROWS=128), shape(8, 2, ROWS=128), shape(8, 2, ROWS=64), shape(8, 3, ROWS=64)]
ROWS += [shape(4, 2, ROWS=32), shape(8, 1, ROWS=32), shape(8, 1, ROWS=16)]
TIMED = 3  # number of shapes that are timed: the largest that fit
WIDE = 32  # largest number of float32 rows; from 64 on the compiler mixes in other instructions of sm_90


def tuned(key: list[str], shapes: list[triton.Config], largest_side: int, **smallest: int) -> Callable[[Any], Any]:
    """Let Triton time a few shapes of tiles once for each ``key``, and keep the fastest on disk (``cache_results``).

    Args:
        key: arguments whose change requires a new timing, besides the types of tensors.
        shapes: candidates, the largest first; the first TIMED that fit are timed.
        largest_side: largest size in bytes of the larger side of a tile of 16-bit numbers.
        smallest: sizes for Triton's interpreter, which times nothing.
    """

    def fitting(configs: list[triton.Config], named: dict[str, Any], **_: Any) -> list[triton.Config]:
        dim = padded(max(named["D"], named.get("E", 0)))
        wide = named["q"].element_size() == 4 or named.get("CODED", False)  # three products, or dequantised
        most_rows, block = largest_side // (dim * 2), named.get("BLOCK", 1)  # KEYS are whole numbers of blocks
        if wide:
            most_rows = min(most_rows // 4, WIDE)  # float32: twice the bytes, and two TF32 parts of each number
        sizes = ((x, x.kwargs.get("KEYS", x.kwargs["ROWS"])) for x in configs)
        return [x for x, size in sizes if size <= most_rows and size % block == 0][:TIMED] or configs[-1:]

    candidates = [shape(4, 1, **smallest)] if INTERPRETED else shapes
    decorate: Callable[[Any], Any] = triton.autotune(
        candidates, key=key, prune_configs_by={"early_config_prune": fitting}, cache_results=True
    )
    return decorate


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[..., T, D]``; copy it unless its last dimension is contiguous and tiles have 32-bit offsets."""
    return x if x.stride(-1) == 1 and x.stride(-2) <= FARTHEST else x.contiguous()


def padding_bias(key_valid: torch.Tensor | None) -> torch.Tensor | None:
    """Return the bias of padding keys, 0 or -inf, float32 ``[B, T]``. None: no padding."""
    if key_valid is None:
        return None
    bias = torch.zeros(key_valid.shape, dtype=torch.float32, device=key_valid.device)
    return bias.masked_fill_(~key_valid, float("-inf"))


def logits2(sinks: torch.Tensor | None) -> torch.Tensor | None:
    """Return sink logits ``[H]`` in base 2, float32. None: no sink logits."""
    return None if sinks is None else (sinks.float() * LOG2E).contiguous()


def cap2(cap: float | None) -> float | None:
    """Return the cap of logits in base 2. None: no cap."""
    return None if cap is None else cap * LOG2E


def key_block(q: torch.Tensor) -> int:
    """Return the number of keys of a tile for the type and head size of ``q``."""
    if INTERPRETED or q.element_size() == 4:
        return 16
    return 64 if q.shape[-1] <= 128 else 32


def padded(dim: int) -> int:
    """Return the head size of a tile: a power of two that tensor cores support."""
    return max(16, 1 << (dim - 1).bit_length())


def size_class(length: int) -> int:
    """Return the class of a length for the tuner's key."""
    return sum(length > limit for limit in CLASSES)


@triton.jit
def load_rows(base, stride, start, length, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Load rows ``start ... start + N`` of a ``[T, D]`` tensor, zeros outside.

    Offsets of blocks have 64 bits, offsets inside a block 32: :func:`readable` ensures that the strides fit.
    """
    rows, dims = tl.arange(0, N), tl.arange(0, DP)
    pointers = base + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + dims[None, :]
    mask = (rows < length - start)[:, None]
    if D < DP:
        mask = mask & (dims < D)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def pool_indices(table, slots, valid, PAGE: tl.constexpr):
    """Return the pool indices of a row's slots by its block table ``table``."""
    pages = tl.load(table + slots // PAGE, mask=valid, other=0)
    return tl.cast(pages, tl.int64) * PAGE + slots % PAGE


@triton.jit
def load_tokens(column, at, valid, dtype: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CODED: tl.constexpr):
    """Load tokens at pool indices of a column of numbers or of codes (ag.kernels.codes.Codes); 0 if not ``valid``."""
    dims = tl.arange(0, DP)
    mask = valid[:, None]
    if D < DP:
        mask = mask & (dims < D)[None, :]
    groups: tl.constexpr = (D + GROUP - 1) // GROUP if CODED else 0
    token = at * (D + 4 * groups)
    x = tl.load(column + token[:, None] + dims[None, :], mask=mask, other=0)
    if CODED:
        pairs = (column + D).to(tl.pointer_type(tl.float16)) + token[:, None] // 2 + (dims // GROUP * 2)[None, :]
        scale, offset = tl.load(pairs, mask=mask, other=0.0), tl.load(pairs + 1, mask=mask, other=0.0)
        x = (x.to(tl.float32) * scale.to(tl.float32) + offset.to(tl.float32)).to(dtype)
    return x


@triton.jit
def copy_tokens(column, source, stride, tokens, at, valid, D: tl.constexpr, DP: tl.constexpr):
    """Copy tokens, which lie ``stride`` apart in ``source``, to pool indices of a column."""
    dims = tl.arange(0, DP)
    mask = valid[:, None] & (dims < D)[None, :]
    x = tl.load(source + tokens[:, None] * stride + dims[None, :], mask=mask)
    tl.store(column + at[:, None] * D + dims[None, :], x, mask=mask)


@triton.jit
def store_rows(base, stride, start, length, x, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Store rows, as :func:`load_rows` loads them."""
    rows, dims = tl.arange(0, N), tl.arange(0, DP)
    pointers = base + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + dims[None, :]
    mask = (rows < length - start)[:, None]
    if D < DP:
        mask = mask & (dims < D)[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def program_tile(T, SIZE: tl.constexpr):
    """Return the block of ``SIZE`` tokens and the (sequence, head) pair of a program.

    Grids have one axis: CUDA limits further axes to 65,535, fewer than the pairs of a large batch.
    """
    blocks = tl.cdiv(T, SIZE)
    return tl.program_id(0) % blocks, tl.program_id(0) // blocks


@triton.jit
def head_pointer(base, strides, first, second):
    """Return the address of ``[first, second]`` of a ``[B, H, T, D]`` tensor."""
    return base + tl.cast(first, tl.int64) * strides[0] + tl.cast(second, tl.int64) * strides[1]


@triton.jit
def ranges(start, kept_before, dense, recent, window, T, ROWS: tl.constexpr, KEYS: tl.constexpr, floors=None):
    """Return the ranges of key blocks of a block of queries: blocks without masks, then blocks that need masks.

    Blocks ``[unmasked_start, unmasked_stop)`` lie before every protected key. If ``listed``, the range indexes the list
    of blocks with a kept key; else these are block numbers. ``[masked_start, stop)`` are block numbers.
    """
    masked_start = tl.maximum(start - recent + 1, 0) // KEYS
    unmasked_start = masked_start * 0
    if window is not None:
        unmasked_start = tl.maximum(start - window + 1, 0) // KEYS
    if floors is not None:
        unmasked_start = tl.maximum(unmasked_start, tl.load(floors + start) // KEYS)
    masked_start = tl.maximum(masked_start, unmasked_start)
    stop = tl.cdiv(tl.minimum(start + ROWS, T), KEYS)
    listed = kept_before is not None
    if kept_before is not None:
        listed = start >= 0
        if dense is not None:
            listed = start >= dense
        unmasked_start = tl.where(listed, tl.load(kept_before + unmasked_start), unmasked_start)
        unmasked_stop = tl.where(listed, tl.load(kept_before + masked_start), masked_start)
    else:
        unmasked_stop = masked_start
    return unmasked_start, unmasked_stop, masked_start, stop, listed


@triton.jit
def weights(start, n, gate, padding, dense, recent, window, T, ROWS: tl.constexpr, KEYS: tl.constexpr,
            MASKED: tl.constexpr, floor=None):  # fmt: skip
    """Return the bias of the logits of a tile by flags and masks: ``[ROWS or 1, KEYS]``."""
    rows = start + tl.arange(0, ROWS)[:, None]
    columns = n * KEYS + tl.arange(0, KEYS)[None, :]
    protected = tl.zeros([1, KEYS], tl.float32)
    if padding is not None:
        protected = tl.load(padding + columns, mask=columns < T, other=float("-inf"))
    bias = protected
    if gate is not None:
        bias = tl.load(gate + columns, mask=columns < T, other=float("-inf"))
        if dense is not None:
            bias = tl.where(rows < dense, protected, bias)
        if MASKED:
            bias = tl.where(rows - columns < recent, protected, bias)
    if MASKED:
        bias = tl.where(rows >= columns, bias, float("-inf"))
    if window is not None:
        bias = tl.where(rows - columns < window, bias, float("-inf"))
    if floor is not None:
        bias = tl.where(columns >= floor[:, None], bias, float("-inf"))
    return bias


@triton.jit
def cap_logits(s, cap):
    """Cap logits, both in base 2: cap tanh(s / cap). Near 0, where 1 - e^(-2|x|) would cancel, by a polynomial."""
    if cap is not None:
        x = s / cap
        square = x * x
        p = 62 / 2835 + square * (-1382 / 155925 + square * (21844 / 6081075))
        by_series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * p))))
        e = tl.exp2(tl.abs(x) * -2.8853900817779268)  # 2 / ln 2
        by_exp = (1.0 - e) / (1.0 + e)
        s = cap * tl.where(square < 0.25, by_series, tl.where(x < 0, -by_exp, by_exp))
    return s


@triton.jit
def softmax_start(sinks, head, ROWS: tl.constexpr):
    """Return the initial sum and largest logit of the softmax of a head's rows; a sink logit, if any, is included."""
    total, largest = tl.zeros([ROWS], tl.float32), tl.full([ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        total += 1.0
        largest = tl.zeros([ROWS], tl.float32) + tl.load(sinks + head)
    return total, largest


@triton.jit
def softmax_update(s, values, total, largest, mixed):
    """Add the logits and values of one tile to the running softmax of its rows."""
    larger = tl.maximum(largest, tl.max(s, 1))
    finite = tl.where(larger == float("-inf"), 0.0, larger)
    p = tl.exp2(s - finite[:, None])
    shrink = tl.exp2(largest - finite)
    mixed = tl.dot(p.to(values.dtype), values, mixed * shrink[:, None], input_precision=FLOAT32)
    return total * shrink + tl.sum(p, 1), larger, mixed
