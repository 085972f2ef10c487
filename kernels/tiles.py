"""What the Triton kernels share: loading and storing rows, which blocks a block of queries meets, and its masks."""

from __future__ import annotations

import triton
import triton.language as tl

from ag.kernels import codes

# How float32 tiles are multiplied, on tensor cores; 16-bit ones are left as they are. A number a is split into two TF32
# numbers of 11 significant bits, a' and a'', so that |a - a' - a''| <= 2^-22 |a|. A product is a'b' + a'b'' + a''b',
# without a''b'', at most 2^-22 |ab|. So it is wrong by at most 3 * 2^-22 |ab|, 6 roundings (2^-23), and a sum of n
# products by (6 + n) 2^-23 sum |ab|: n, as float32 operations in any order, and 6 more. The interpreter multiplies in
# float32 whatever stands here.
FLOAT32 = tl.constexpr("tf32x3")
GROUP = tl.constexpr(codes.GROUP)


@triton.jit
def load_rows(base, stride, start, length, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Load rows ``start ... start + N`` of a ``[T, D]`` tensor, zeros outside.

    Offsets of blocks are 64 bits wide, those inside a block 32: ag.kernels.tuned.readable sees to the strides.
    """
    rows, dims = tl.arange(0, N), tl.arange(0, DP)
    pointers = base + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + dims[None, :]
    mask = (rows < length - start)[:, None]
    if D < DP:
        mask = mask & (dims < D)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def places(table, slots, there, PAGE: tl.constexpr):
    """Return where in a pool the slots of a row lie, whose pages ``table`` names."""
    pages = tl.load(table + slots // PAGE, mask=there, other=0)
    return tl.cast(pages, tl.int64) * PAGE + slots % PAGE


@triton.jit
def load_places(column, at, there, D: tl.constexpr, DP: tl.constexpr):
    """Load the tokens at these places of a pool's column ``[P, page, D]``, zeros where there is none."""
    dims = tl.arange(0, DP)
    mask = there[:, None]
    if D < DP:
        mask = mask & (dims < D)[None, :]
    return tl.load(column + at[:, None] * D + dims[None, :], mask=mask, other=0.0)


@triton.jit
def load_tokens(column, at, there, dtype: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CODED: tl.constexpr):
    """Load what :func:`load_places` does, of a column of numbers or of codes: ag.kernels.codes.Codes."""
    if not CODED:
        x = load_places(column, at, there, D, DP)
    else:
        dims = tl.arange(0, DP)
        groups: tl.constexpr = (D + GROUP - 1) // GROUP
        token = at * (D + 4 * groups)
        mask = there[:, None] & (dims < D)[None, :]
        code = tl.load(column + token[:, None] + dims[None, :], mask=mask, other=0)
        pairs = (column + D).to(tl.pointer_type(tl.float16)) + token[:, None] // 2 + (dims // GROUP * 2)[None, :]
        scale, offset = tl.load(pairs, mask=mask, other=0.0), tl.load(pairs + 1, mask=mask, other=0.0)
        x = (code.to(tl.float32) * scale.to(tl.float32) + offset.to(tl.float32)).to(dtype)
    return x


@triton.jit
def store_rows(base, stride, start, length, x, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Store what :func:`load_rows` loads."""
    rows, dims = tl.arange(0, N), tl.arange(0, DP)
    pointers = base + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + dims[None, :]
    mask = (rows < length - start)[:, None]
    if D < DP:
        mask = mask & (dims < D)[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def turn(T, SIZE: tl.constexpr):
    """Return which block of ``SIZE`` tokens, and which (sequence, head) pair, a program works on.

    Grids have one axis, because a card ends the other two at 65,535: fewer than the pairs of a large batch.
    """
    blocks = tl.cdiv(T, SIZE)
    return tl.program_id(0) % blocks, tl.program_id(0) // blocks


@triton.jit
def at(base, strides, first, second):
    """Return the address of ``[first, second]`` of a ``[B, H, T, D]`` tensor."""
    return base + tl.cast(first, tl.int64) * strides[0] + tl.cast(second, tl.int64) * strides[1]


@triton.jit
def ranges(start, before, dense, recent, window, T, ROWS: tl.constexpr, KEYS: tl.constexpr, floors=None):
    """Return the key blocks of a block of queries: which are far, and which hold keys that it may not or must see.

    Far blocks ``[far, near)`` lie below every protected key; when ``listed`` they are indices into the list of blocks
    with a kept key, else block numbers. ``[near, stop)`` are block numbers.
    """
    near = tl.maximum(start - recent + 1, 0) // KEYS
    far = near * 0
    if window is not None:
        far = tl.maximum(start - window + 1, 0) // KEYS
    if floors is not None:
        far = tl.maximum(far, tl.load(floors + start) // KEYS)
    near = tl.maximum(near, far)
    stop = tl.cdiv(tl.minimum(start + ROWS, T), KEYS)
    listed = before is not None
    if before is not None:
        listed = start >= 0
        if dense is not None:
            listed = start >= dense
        far = tl.where(listed, tl.load(before + far), far)
        far_stop = tl.where(listed, tl.load(before + near), near)
    else:
        far_stop = near
    return far, far_stop, near, stop, listed


@triton.jit
def weights(start, n, gate, padding, dense, recent, window, T, ROWS: tl.constexpr, KEYS: tl.constexpr,
            NEAR: tl.constexpr, floor=None):  # fmt: skip
    """Return what the flags and masks add to the logits of a tile: ``[ROWS or 1, KEYS]``."""
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
        if NEAR:
            bias = tl.where(rows - columns < recent, protected, bias)
    if NEAR:
        bias = tl.where(rows >= columns, bias, float("-inf"))
    if window is not None:
        bias = tl.where(rows - columns < window, bias, float("-inf"))
    if floor is not None:
        bias = tl.where(columns >= floor[:, None], bias, float("-inf"))
    return bias


@triton.jit
def bend(s, cap):
    """Cap logits, both in base 2: cap tanh(s / cap). Near 0, where 1 - e^(-2|x|) would cancel, by a polynomial."""
    if cap is not None:
        x = s / cap
        square = x * x
        p = 62 / 2835 + square * (-1382 / 155925 + square * (21844 / 6081075))
        near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * p))))
        e = tl.exp2(tl.abs(x) * -2.8853900817779268)  # 2 / ln 2
        far = (1.0 - e) / (1.0 + e)
        s = cap * tl.where(square < 0.25, near, tl.where(x < 0, -far, far))
    return s


@triton.jit
def begun(sinks, head, ROWS: tl.constexpr):
    """Return the sum and the largest logit that the softmax of a head's rows begins with: of a sink, or of nothing."""
    total, largest = tl.zeros([ROWS], tl.float32), tl.full([ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        total += 1.0
        largest = tl.zeros([ROWS], tl.float32) + tl.load(sinks + head)
    return total, largest


@triton.jit
def mix(s, values, total, largest, mixed):
    """Take the logits and values of one tile into the running softmax of its rows."""
    larger = tl.maximum(largest, tl.max(s, 1))
    finite = tl.where(larger == float("-inf"), 0.0, larger)
    p = tl.exp2(s - finite[:, None])
    shrink = tl.exp2(largest - finite)
    mixed = tl.dot(p.to(values.dtype), values, mixed * shrink[:, None], input_precision=FLOAT32)
    return total * shrink + tl.sum(p, 1), larger, mixed
