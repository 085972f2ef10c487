"""Inputs on which a sum loses what it is about: for every version of a kernel, against float64."""

from collections.abc import Callable

import torch
from torch import Tensor

SCALING = 0.125
#: What is hard, and the largest error of the output, or of a gradient, relative to its largest entry.
HARD = {
    "values far from the origin": (1e-5, 2e-4),  # eps * 100, ten times over
    "one key has it all": (1e-5, 2e-5),
    "one key has it all, far from the origin": (1e-5, 1e-3),  # the gradients of q and k nearly vanish beside that
    "equal keys": (1e-5, 2e-5),
    "logits of 80": (1e-5, 2e-5),
}


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
    wanted = with_gradients(reference, *(x.double() for x in made))
    largest = max(x.abs().max() for x in wanted[1:3])  # of q and k: either may be 0 but for rounding
    for index, (got, want) in enumerate(zip(with_gradients(attention, *made), wanted, strict=True)):
        scale = largest if index in (1, 2) else want.abs().max()
        assert (got.double() - want).abs().max() <= HARD[name][index > 0] * scale, (name, index)


def check_column_sums(
    sums: Callable[..., Tensor], reference: Callable[..., Tensor], name: str, length: int, power: int
) -> None:
    """Hold column sums to float64, relative to the value or to a hundredth of the largest."""
    q, k, *_ = hard(name, length)
    queries = torch.ones(1, length, dtype=torch.bool)
    want = reference(q.double(), k.double(), SCALING, queries, power=power)
    got = sums(q, k, SCALING, queries, power=power).double()
    assert ((got - want).abs() <= 1e-5 * torch.maximum(want, 0.01 * want.max())).all()


def check_column_max(maxima: Callable[..., Tensor], reference: Callable[..., Tensor], name: str, length: int) -> None:
    """Hold column maxima to float64, relative to the value or to a hundredth of the largest."""
    q, k, *_ = hard(name, length)
    queries = torch.ones(1, length, dtype=torch.bool)
    want = reference(q.double(), k.double(), SCALING, queries)
    got = maxima(q, k, SCALING, queries).double()
    assert ((got - want).abs() <= 1e-5 * torch.maximum(want, 0.01 * want.max())).all()
