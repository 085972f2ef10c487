"""What each kernel reaches of what a copy and a matrix product do: ``python -m scripts.gpu.kernels KEY=VALUE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.utils.import_utils import is_flash_attn_2_available

from ag.bench.measure import call_seconds
from ag.bench.sdpa import pinned
from ag.engine.block_pool import BLOCK
from ag.errors import UserError, first_line
from ag.kernels.attention_stats import attention_stats
from ag.kernels.gated_attention import gated_attention
from ag.kernels.gated_prefill import gated_prefill
from ag.kernels.paged_attention import paged_attention
from ag.kernels.pages import Pages
from scripts.gpu.options import read_options

Row = dict[str, Any]


@dataclass(frozen=True)
class KernelConfig:
    """The options of a measurement.

    Attributes:
        output: JSON file for the rows.
        device: cuda, cuda:1, cpu, ...
        dtype: of queries, keys and values.
        heads: query heads.
        kv_heads: KV heads.
        dim: size of a head.
        train: tokens of a training row.
        prompt: tokens of a prompt.
        decode: tokens of a sequence that is decoded: more than the card's cache holds.
        keep: share of the keys that is kept.
        batch: sequences that are decoded at once.
        copy: bytes of the copy.
        square: rows and columns of the matrix product.
        rounds: times that each is run where no graph is replayed; the median counts.
    """

    output: str = "runs/kernels.json"
    device: str = "cuda"
    dtype: str = "bfloat16"
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    train: int = 8192
    prompt: int = 100_000
    decode: int = 131_072
    keep: float = 0.25
    batch: tuple[int, ...] = (1, 8)
    copy: int = 1 << 30
    square: int = 8192
    rounds: int = 10


@dataclass(frozen=True)
class Case:
    """A call of a kernel.

    Attributes:
        name: of the kernel, and what it does.
        size: in words.
        run: calls it.
        flops: multiplications and additions that the result needs.
        bytes: what must be read and written once.
        rivals: calls that do the same without eviction, by name.
    """

    name: str
    size: str
    run: Callable[[], object]
    flops: float
    bytes: float
    rivals: Mapping[str, Callable[[], object]]


def measure(config: KernelConfig) -> dict[str, Any]:
    """Return what a copy and a matrix product reach, and a row for each kernel.

    A rival that cannot do the same has the reason in place of its time.
    """
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    timed = partial(call_seconds, device, rounds=config.rounds)

    def rival(step: Callable[[], object]) -> float | str:
        try:
            return 1000 * timed(step)[0]
        except RuntimeError as error:  # the implementation cannot do this, or there is no room
            return first_line(error)

    copied = 2 * config.copy / timed(_copy(config.copy, device))[0]
    multiplied = 2 * config.square**3 / timed(_product(config.square, device, dtype))[0]
    rows = []
    for make in (_training, _prefill, _columns, *[_decoding(batch) for batch in config.batch]):
        for case in make(config, device, dtype):
            took, how = timed(case.run)
            memory, compute = case.bytes / copied, case.flops / multiplied
            rows.append(
                {
                    "kernel": case.name,
                    "size": case.size,
                    "ms": 1000 * took,
                    "timed by": how,
                    "GB/s": case.bytes / took / 1e9,
                    "TFLOP/s": case.flops / took / 1e12,
                    "of copy": memory / took,
                    "of matmul": compute / took,
                    "bound by": "memory" if memory > compute else "compute",
                    "of bound": max(memory, compute) / took,
                    **{f"{name} ms": rival(step) for name, step in case.rivals.items()},
                }
            )
    return {"copy GB/s": copied / 1e9, "matmul TFLOP/s": multiplied / 1e12, "rows": rows}


def _copy(size: int, device: torch.device) -> Callable[[], object]:
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: a @ b


Cases = list[Case]


def _draw(config: KernelConfig, heads: int, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    make = torch.Generator(device).manual_seed(heads * length)
    return torch.randn(1, heads, length, config.dim, generator=make, device=device).to(dtype)


def _inputs(config: KernelConfig, length: int, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Draw queries, keys and values, and which keys stay."""
    qkv = [_draw(config, heads, length, device, dtype) for heads in (config.heads, config.kv_heads, config.kv_heads)]
    make = torch.Generator(device).manual_seed(length)
    return qkv, torch.rand(1, config.kv_heads, length, generator=make, device=device) < config.keep


def _dense(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return causal attention to all keys by torch's implementations, and by flash-attn where it is installed."""

    def attend(backend: str) -> Tensor:
        with pinned(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)

    backends = ("flash", "cudnn") if q.device.type == "cuda" else ("flash",)
    found: dict[str, Callable[[], Tensor]] = {backend: partial(attend, backend) for backend in backends}
    if q.device.type == "cuda" and is_flash_attn_2_available() and q.dtype != torch.float32:
        from flash_attn import flash_attn_func

        turned = [x.transpose(1, 2) for x in (q, k, v)]
        found["flash-attn"] = lambda: flash_attn_func(*turned, causal=True)
    return found


def _training(config: KernelConfig, device: torch.device, dtype: torch.dtype) -> Cases:
    """Attention under flags, which meets every causal pair; backward counts 2.5 times the products of forward."""
    (q, k, v), kept = _inputs(config, config.train, device, dtype)
    keep = kept.float()
    leaves = [x.requires_grad_() for x in (q, k, v, keep)]
    weight = torch.randn_like(q)
    flops = 2 * config.heads * config.dim * config.train**2

    def forward() -> Tensor:
        with torch.no_grad():
            return gated_attention(q, k, v, keep)

    def both(attend: Callable[[], Tensor], inputs: list[Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(), inputs, weight)

    def quietly(attend: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return torch.no_grad()(attend)

    once = sum(x.nbytes for x in (q, k, v, q))
    rivals = _dense(q, k, v)
    trained = {name: both(rival, leaves[:3]) for name, rival in rivals.items()}
    size = f"{config.train:,} tokens"
    return [
        Case("gated_attention forward", size, forward, flops, once, {n: quietly(r) for n, r in rivals.items()}),
        Case(
            "gated_attention forward + backward",
            size,
            both(lambda: gated_attention(q, k, v, keep), leaves),
            3.5 * flops,
            3 * once,
            trained,
        ),
    ]


def _prefill(config: KernelConfig, device: torch.device, dtype: torch.dtype) -> Cases:
    """Attention to kept keys and a query's own."""
    (q, k, v), keep = _inputs(config, config.prompt, device, dtype)
    later = torch.arange(config.prompt, 0, -1, device=device)  # queries that a key can meet
    pairs = float((keep * later + ~keep).sum()) * (config.heads // config.kv_heads)
    once = sum(x.nbytes for x in (q, k, v, q))
    size = f"{config.prompt:,} tokens, {config.keep:.0%} kept"
    return [
        Case("gated_prefill", size, lambda: gated_prefill(q, k, v, keep), 4 * pairs * config.dim, once, _dense(q, k, v))
    ]


def _columns(config: KernelConfig, device: torch.device, dtype: torch.dtype) -> Cases:
    """Sums and maxima of weights over queries, which need the products with keys twice, first for the norms."""
    (q, k, _), _ = _inputs(config, config.train, device, dtype)
    ranks = torch.arange(config.train, device=device)[None]
    flops = 2 * config.heads * config.dim * config.train**2
    once = q.nbytes + k.nbytes + 4 * config.heads * config.train
    size, given = f"{config.train:,} tokens", (q, k, ranks, ranks[None], config.dim**-0.5)
    return [
        Case(f"attention_stats {kind}", size, partial(attention_stats, kind, *given), flops, once, {})
        for kind in ("sum", "max")
    ]


def _decoding(batch: int) -> Callable[[KernelConfig, torch.device, torch.dtype], Cases]:
    """One query a sequence, heads that hold different numbers of tokens; rivals read as many, equally many a head."""

    def make(config: KernelConfig, device: torch.device, dtype: torch.dtype) -> Cases:
        rows = batch * config.kv_heads
        share = (0.7 * torch.randn(rows, generator=torch.Generator().manual_seed(rows))).exp()
        lengths = (share / share.mean() * config.keep * config.decode).clamp(1, config.decode).long().to(device)
        total, counts = int(lengths.sum()), (lengths + BLOCK - 1) // BLOCK
        pages = int(counts.sum())
        keys, values = (torch.randn(pages, BLOCK, config.dim, device=device).to(dtype) for _ in range(2))
        places = torch.arange(int(counts.max()), device=device)
        table = ((counts.cumsum(0) - counts)[:, None] + places).int()  # behind a row's last page anything
        q = torch.randn(batch, config.heads, 1, config.dim, device=device).to(dtype)
        even = [torch.randn(batch, config.kv_heads, total // rows, config.dim, device=device).to(dtype) for _ in "kv"]
        flops = 4.0 * total * config.dim * config.heads // config.kv_heads
        size = f"{batch} x {config.decode:,} tokens, {config.keep:.0%} kept, uneven"
        ranks = torch.zeros(pages, BLOCK, dtype=torch.int32, device=device)  # nothing asks for them
        laid = Pages(keys, values, ranks, None, table, lengths.int())
        run = lambda: paged_attention(q, laid, None, config.dim**-0.5)  # noqa: E731
        once = 2 * total * config.dim * keys.element_size()
        return [Case("paged_attention", size, run, flops, once, _dense(q, *even))]

    return make


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        config = read_options(sys.argv[1:] if argv is None else argv, KernelConfig)
    except UserError as error:
        print(f"scripts.gpu.kernels: error: {error}", file=sys.stderr)
        return 2
    Path(config.output).write_text(json.dumps(measure(config), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
