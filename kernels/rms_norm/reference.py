"""The norm as transformers computes it."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute :func:`ag.kernels.rms_norm.rms_norm` in PyTorch."""
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return weight * normed.to(x.dtype)
