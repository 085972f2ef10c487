"""The device, sizes, arguments and references of the CUDA tests.

With ``AG_GPU_REHEARSAL=1`` the same bodies run on a CPU in Triton's interpreter, with short rows, and float16 in place
of bfloat16, which the interpreter cannot multiply.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ag.kernels.gated_attention import chunked, reference
from ag.kernels.gated_attention.masks import Masks
from tests.support.bounds import Right, right

REHEARSAL = os.environ.get("AG_GPU_REHEARSAL") == "1"
DEVICE = "cpu" if REHEARSAL else "cuda"
FEW: dict[str, Any] = {"num_hidden_layers": 1} if REHEARSAL else {}  # in the interpreter each layer takes its time

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
DIMS = (64, 80, 96, 128, 256)
#: Head sizes and types. The interpreter's tiles are the same for all, and tests/kernels shows its numbers.
PAIRS = [(64, torch.float32), (80, torch.float16)] if REHEARSAL else list(product(DIMS, PRECISIONS))
GROUPS = (1, 4, 8)
LENGTHS = (2, 3, 63, 64, 65, 127, 1000, 4097, 8193)
REHEARSED = {63: 15, 64: 16, 65: 17, 127: 18, 1000: 20, 4097: 31, 8193: 33}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "protected": {"recent": 70, "sinks": 3},
    "window": {"window": 100, "recent": 5, "sinks": 3},
    "left-padding": {"padding": "left", "sinks": 2},
    "right-padding": {"padding": "right", "sinks": 2, "recent": 2},
    "documents": {"documents": True, "recent": 5, "sinks": 3},
    "all": {"padding": "left", "window": 200, "recent": 5, "sinks": 3, "dense": True, "documents": True},
}
FLAGS = ("hard", "soft", "evicted", None)


def here(length: int) -> int:
    """Return a length, or the one that stands for it in a rehearsal."""
    return REHEARSED.get(length, min(length, 40)) if REHEARSAL else length


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(torch.float16 if REHEARSAL and dtype == torch.bfloat16 else dtype)


def covering(*others: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return a row for each head size and type, with three (length, group) pairs; the other columns take turns.

    A kernel is compiled once a row; every length meets every group, and every value of the others several head sizes.
    """
    if REHEARSAL:
        return [(*pair, [(65, 2)], *(values[-index] for values in others)) for index, pair in enumerate(PAIRS)]
    rows = []
    for index, (dim, dtype) in enumerate(PAIRS):
        sizes = [(LENGTHS[(3 * index + i) % 9], GROUPS[(index + index // 3 + i) % 3]) for i in range(3)]
        rows.append((dim, dtype, sizes, *(values[index % len(values)] for values in others)))
    return rows


def name(value: Any) -> str:
    """Name a parameter of a test."""
    if isinstance(value, list):
        return "+".join(f"T{length}G{group}" for length, group in value)
    return str(value).removeprefix("torch.")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return cast(torch.randn(*shape, device=DEVICE), dtype)


def arguments(
    *,
    length: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    flags: str | None = "hard",
    padding: str | None = None,
    dense: bool = False,
    documents: bool = False,
    **options: Any,
) -> tuple[list[Tensor], Tensor | None, dict[str, Any]]:
    """Return q, k and v, none contiguous, the keep flags, transposed as gates give them, and the options."""
    torch.manual_seed(length * 31 + dim)
    batch, kv_heads = (1, 1) if length > 4000 or (REHEARSAL and group == 8) else (2, 1 if REHEARSAL else 2)
    q, k, v = (draw(batch, length, n, dim, dtype=dtype).transpose(1, 2) for n in (group * kv_heads, kv_heads, kv_heads))
    keep = torch.rand(batch, length, kv_heads, device=DEVICE).transpose(1, 2)
    if flags == "soft":
        keep[:, :, length // 4 : length // 2] = 0  # whole blocks of evicted keys
    else:
        keep = (keep > 0.5).float() * (flags != "evicted")
    rows = torch.arange(length, device=DEVICE).expand(batch, -1)
    padded = torch.tensor([0, length // 3][-batch:], device=DEVICE)[:, None]
    options |= {"key_valid": None, "scaling": dim**-0.5}
    if padding:
        options["key_valid"] = rows >= padded if padding == "left" else rows < length - padded
    if dense:
        options["dense_until"] = torch.tensor([length // 3, length // 2], device=DEVICE)[:batch]
    if documents:
        borders = torch.tensor([[0, length // 5, length // 5 + 1], [0, length // 2, length - 2]], device=DEVICE)[:batch]
        options["first"] = torch.where(borders[:, :, None] <= rows[:, None], borders[:, :, None], 0).amax(1)
    return [q, k, v], None if flags is None else keep, options


def of_masks(version: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a version take the operation's options."""
    return lambda q, k, v, keep=None, scaling=None, **masks: version(q, k, v, keep, Masks(**masks), scaling)


formula, plain_torch = of_masks(reference.gated_attention), of_masks(chunked.gated_attention)


def run(
    function: Callable[..., Tensor], tensors: list[Tensor], weight: Tensor, options: dict[str, Any]
) -> list[Tensor]:
    """Return the output and the gradient of each of the tensors."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors]
    out = function(*leaves, **options)
    (out * weight.to(out.dtype)).sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def exact(
    function: Callable[..., Tensor],
    tensors: list[Tensor],
    weight: Tensor,
    options: dict[str, Any],
    gradients: bool = True,
) -> list[Right]:
    """Return what :func:`run` has to give: in float64, one query head at a time, so that n^2 matrices fit."""
    group = tensors[0].shape[1] // tensors[1].shape[1]

    def computed(weight: Tensor, *tensors: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(gradients) for x in tensors]
        out = torch.zeros_like(weight)
        for b, h in product(range(len(weight)), range(weight.shape[1])):
            q, *rest = ((x[b : b + 1, i : i + 1]) for x, i in zip(leaves, [h, *[h // group] * 3], strict=False))
            mine = {name: x[b : b + 1] if isinstance(x, Tensor) else x for name, x in options.items()}
            one = function(q, *rest, **mine)
            if gradients:
                (one * weight[b : b + 1, h : h + 1]).sum().backward()
            out[b, h] = one.detach()[0, 0]
        return [out, *(x.grad for x in leaves if x.grad is not None)]

    return right(computed, weight, *tensors)


def scattered(lengths: list[int], dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, table and lengths of rows whose pages lie scattered in a pool; free slots hold no numbers."""
    counts = torch.tensor([here(length) for length in lengths])
    needed = counts // 16 + 1
    table = torch.full((len(counts), int(needed.max())), -1, dtype=torch.int32)
    there = torch.arange(table.shape[1]) < needed[:, None]
    table[there] = torch.randperm(int(needed.sum())).int()
    keys, values = (draw(int(needed.sum()), 16, dim, dtype=dtype) for _ in "kv")
    slots = torch.arange(table.shape[1] * 16)
    free = (slots >= counts[:, None]) & there[:, slots // 16]
    at = (table[:, slots // 16].long() * 16 + slots % 16)[free].to(DEVICE)
    for x in (keys, values):
        x.view(-1, dim)[at] = torch.nan
    return keys, values, table.to(DEVICE), counts.int().to(DEVICE)
