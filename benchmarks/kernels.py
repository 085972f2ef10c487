"""Time the Triton kernels on a card, beside torch's attention to all keys: ``python -m benchmarks.kernels FOLDER``.

Heads are those of an 8B geometry. ``of bound`` is the time that a kernel's bytes take at the speed of a copy, or its
operations at the speed of a matrix product, whichever is longer, over the time it took. The bytes are those that must
be read and written once, the operations those that the result needs. Writes ``kernels.json`` and ``kernels.md``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ag.bench.arena import pinned
from ag.bench.measure import seconds_of
from ag.engine.block_pool import BLOCK
from ag.errors import first_line
from ag.kernels.attention_stats import attention_stats
from ag.kernels.gated_attention import gated_attention
from ag.kernels.gated_prefill import gated_prefill
from ag.kernels.paged_attention import paged_attention
from ag.kernels.pages import Pages
from scripts.gpu import table

HEADS, KV_HEADS, DIM = 32, 8, 128
KEPT = 0.25  # share of the keys that stays
Call = Callable[[], object]
#: Name, call, operations, bytes, and torch's attention to all keys.
Case = tuple[str, Call, float, float, Call | None]


def measure(device: str, train: int, prompt: int, decode: int, copy: int, square: int) -> dict[str, Any]:
    """Return the speeds of a copy and of a matrix product, and a row for each kernel.

    Args:
        device: ``cuda``; ``cpu`` has float32 in place of bfloat16.
        train: tokens of a training row.
        prompt: tokens of a prompt.
        decode: tokens of a sequence that is decoded: more than the card's cache holds.
        copy: bytes of the copy.
        square: rows and columns of the matrix product.
    """
    where, dtype = torch.device(device), torch.float32 if device == "cpu" else torch.bfloat16

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, DIM, device=where).to(dtype)

    def timed(call: Call) -> tuple[float, str]:
        return call_seconds(where, call, 10)

    def rival(call: Call | None, backend: str) -> float | str:
        try:
            with pinned(backend):
                return "" if call is None else 1000 * timed(call)[0]
        except RuntimeError as error:  # the implementation cannot do this, or there is no room
            return first_line(error)

    source = torch.empty(copy, dtype=torch.uint8, device=where)
    target, factor = torch.empty_like(source), torch.randn(square, square, device=where).to(dtype)
    copied = 2 * copy / timed(lambda: target.copy_(source))[0]
    multiplied = 2 * square**3 / timed(lambda: factor @ factor)[0]
    rows = []
    for cases in (training(draw, train), prefill(draw, prompt), decoding(draw, decode)):
        for name, call, operations, moved, dense in cases:
            took, how = timed(call)
            memory, compute = moved / copied / took, operations / multiplied / took
            row: dict[str, Any] = {"kernel": name, "ms": 1000 * took, "timed by": how, "GB/s": moved / took / 1e9}
            row |= {"TFLOP/s": operations / took / 1e12, "bound by": "memory" if memory > compute else "compute"}
            row |= {"of bound": max(memory, compute)}
            rows.append(row | {f"{backend} ms": rival(dense, backend) for backend in ("flash", "cudnn")})
    return {"copy GB/s": copied / 1e9, "matmul TFLOP/s": multiplied / 1e12, "rows": rows}


def call_seconds(device: torch.device, call: Call, rounds: int) -> tuple[float, str]:
    """Return the median time of a call, and how it was timed.

    On a GPU it is ``graph``: a CUDA graph of many calls is replayed, so that the host does not count. What cannot be
    captured, and everything on a CPU, is timed as it is launched: ``launches``.
    """
    for _ in range(2):  # compiles and tunes
        call()
    if device.type == "cuda":
        try:
            from triton.testing import do_bench_cudagraph

            torch.cuda.synchronize(device)  # it calls on a stream of its own, which does not wait for the operands
            return do_bench_cudagraph(call, return_mode="median") / 1000, "graph"
        except (ImportError, RuntimeError):
            torch.cuda.synchronize(device)
    return median(seconds_of(device, call, rounds)), "launches"


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to all keys; several queries attend causally."""
    return scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)


def training(draw: Callable[..., Tensor], length: int) -> Iterator[Case]:
    """Yield attention under flags, which meets every causal pair, and sums and maxima of attention over queries."""
    q, k, v = draw(1, HEADS, length), draw(1, KV_HEADS, length), draw(1, KV_HEADS, length)
    flags = (torch.rand(1, KV_HEADS, length, device=q.device) < KEPT).float()
    leaves, weight = [x.requires_grad_() for x in (q, k, v, flags)], torch.randn_like(q)
    operations, moved = 2.0 * HEADS * DIM * length**2, 2 * q.nbytes + k.nbytes + v.nbytes
    size = f"{length:,} tokens"
    forward, plain = partial(gated_attention, q, k, v, flags), partial(dense, q, k, v)
    yield f"gated_attention, {size}", torch.no_grad()(forward), operations, moved, torch.no_grad()(plain)
    yield (
        f"gated_attention and backward, {size}",
        lambda: torch.autograd.grad(forward(), leaves, weight),
        3.5 * operations,  # the backward pass has 2.5 times the products of the forward pass
        3 * moved,
        lambda: torch.autograd.grad(plain(), leaves[:3], weight),
    )
    given = q.detach(), k.detach()
    token_indices = torch.arange(length, device=q.device)[None]
    moved = q.nbytes + k.nbytes + 4 * HEADS * length
    for kind in ("sum", "max"):  # the products with keys are needed twice, first for the norms
        call = partial(attention_stats, kind, *given, token_indices, token_indices[None], DIM**-0.5)
        yield f"attention_stats {kind}, {size}", call, operations, moved, None


def prefill(draw: Callable[..., Tensor], length: int) -> Iterator[Case]:
    """Yield attention to the kept keys, and to a query's own key where it is evicted."""
    q, k, v = draw(1, HEADS, length), draw(1, KV_HEADS, length), draw(1, KV_HEADS, length)
    kept = torch.rand(1, KV_HEADS, length, device=q.device) < KEPT
    later = torch.arange(length, 0, -1, device=q.device)  # queries that can meet a key
    pairs = float((kept * later + ~kept).sum()) * HEADS / KV_HEADS
    moved = 2 * q.nbytes + k.nbytes + v.nbytes
    name = f"gated_prefill, {length:,} tokens, {KEPT:.0%} kept"
    yield name, partial(gated_prefill, q, k, v, kept), 4 * pairs * DIM, moved, partial(dense, q, k, v)


def decoding(draw: Callable[..., Tensor], length: int) -> Iterator[Case]:
    """Yield one query a sequence; heads hold different numbers of tokens, torch's the mean of them."""
    for batch in (1, 8):
        count = batch * KV_HEADS
        share = (0.7 * torch.randn(count, generator=torch.Generator().manual_seed(count))).exp()
        q = draw(batch, HEADS, 1)
        lengths = (share / share.mean() * KEPT * length).clamp(1, length).long().to(q.device)
        total, blocks = int(lengths.sum()), (lengths + BLOCK - 1) // BLOCK
        pages, places = int(blocks.sum()), torch.arange(int(blocks.max()), device=q.device)
        at = ((blocks.cumsum(0) - blocks)[:, None] + places).int()  # behind a row's last page anything
        token_indices = torch.zeros(pages, BLOCK, dtype=torch.int32, device=q.device)  # not read
        laid = Pages(draw(pages, BLOCK), draw(pages, BLOCK), token_indices, None, at, lengths.int())
        k, v = (draw(batch, KV_HEADS, total // count) for _ in "kv")
        name = f"paged_attention, {batch} x {length:,} tokens, {KEPT:.0%} kept"
        operations, moved = 4.0 * total * DIM * HEADS / KV_HEADS, 2 * total * DIM * q.element_size()
        yield name, partial(paged_attention, q, laid, None, DIM**-0.5), operations, moved, partial(dense, q, k, v)


def main(folder: Path, found: dict[str, Any]) -> None:
    """Write the measurements."""
    (folder / "kernels.json").write_text(json.dumps(found) + "\n")
    reached = ", ".join(f"{name} {value:.3g}" for name, value in found.items() if name != "rows")
    rows = found["rows"]
    (folder / "kernels.md").write_text(f"{reached}\n\n{table(list(rows[0]), [list(row.values()) for row in rows])}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), measure("cuda", 8192, 100_000, 131_072, 1 << 30, 8192))
