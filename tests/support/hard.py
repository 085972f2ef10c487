"""Inputs on which a sum loses what it is about: for every version of a kernel, against float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.bounds import bounded, hold

SCALING = 0.125
PARTS = ["out", "dq", "dk", "dv", "dkeep"]  # of attention and its gradients
HARD = [
    "values far from the origin",
    "one key has it all",
    "one key has it all, far from the origin",  # the gradients of q and k nearly vanish beside that
    "equal keys",
    "logits of 80",
]


def hard(
    name: str, length: int, heads: int = 4, kv_heads: int = 2, dim: int = 64
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v ``[1, H or Hkv, T, D]``, flags ``[1, Hkv, T]`` and the gradient of the output, in float32."""
    make = torch.Generator().manual_seed(length)
    q, d_out = (torch.randn(1, heads, length, dim, generator=make) for _ in range(2))
    k, v = (torch.randn(1, kv_heads, length, dim, generator=make) for _ in range(2))
    if "origin" in name:
        v += 100
    if name.startswith("one key"):
        q[..., 0] += 30
        k[:, :, 3] = 0
        k[:, :, 3, 0] = 8
    if name == "equal keys":
        k[:] = k[:, :, :1]
    if name == "logits of 80":
        q[:], k[:] = 0, 0
        q[..., 0] = 80 / SCALING
        k[..., 0] = torch.randn(1, kv_heads, length, generator=make).sign()
    keep = (torch.rand(1, kv_heads, length, generator=make) < 0.5).float()
    return q, k, v, keep, d_out


def with_gradients(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, keep: Tensor, d_out: Tensor
) -> list[Tensor]:
    """Return the output of gated attention, and its gradients by all arguments."""
    made = [x.clone().requires_grad_() for x in (q, k, v, keep)]
    out = attention(*made, None, SCALING, recent=4, sinks=1)
    return [out.detach(), *torch.autograd.grad(out, made, d_out)]


def check_gated_attention(
    attention: Callable[..., Tensor], reference: Callable[..., Tensor], name: str, length: int
) -> None:
    """Hold the output and the gradients of gated attention to float64."""
    made = hard(name, length)
    wanted = with_gradients(reference, *map(bounded, made))
    for part, got, want in zip(PARTS, with_gradients(attention, *made), wanted, strict=True):
        hold(got, want, name=part)


def check_stats(
    stats: Callable[..., Tensor], reference: Callable[..., Tensor], kind: str, name: str, length: int
) -> None:
    """Hold what queries pay each key to float64."""
    q, k, *_ = hard(name, length)
    ranks = torch.arange(length)[None]
    want = reference(kind, bounded(q), bounded(k), ranks, ranks[None], SCALING)
    hold(stats(kind, q, k, ranks, ranks[None], SCALING), want)
