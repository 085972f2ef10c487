"""The product as PyTorch computes it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`ag.kernels.linear.linear` in PyTorch."""
    return F.linear(x, weight, bias)
