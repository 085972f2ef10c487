"""Inputs whose sums lose digits."""

import torch
from torch import Tensor

SCALING = 0.125
HARD = [
    "values far from the origin",
    "one key has it all",
    "one key has it all, far from the origin",  # the gradients of q and k nearly vanish beside that
    "equal keys",
    "logits of 80",
]


def hard(
    name: str, length: int, heads: int = 4, kv_heads: int = 2, dim: int = 64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v ``[1, H or Hkv, T, D]`` and flags ``[1, Hkv, T]``, in float32."""
    make = torch.Generator().manual_seed(length)
    q = torch.randn(1, heads, length, dim, generator=make)
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
    return q, k, v, (torch.rand(1, kv_heads, length, generator=make) < 0.5).float()
