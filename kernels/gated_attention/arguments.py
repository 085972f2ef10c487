"""What gated attention asks of its arguments, in training and in prefill."""

from __future__ import annotations

import torch
from torch import Tensor


def check(operation: str, q: Tensor, k: Tensor, v: Tensor, recent: int) -> None:
    """Raise ``ValueError`` unless q is ``[B, H, T, D]``, k and v ``[B, Hkv, T, D]``, and a query sees its own token."""
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    if k.shape != (batch, kv_heads, length, dim) or v.shape[:3] != k.shape[:3] or heads % kv_heads:
        raise ValueError(
            f"{operation}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected q [B, H, T, D] and "
            "k, v [B, Hkv, T, D] with H a multiple of Hkv."
        )
    if recent < 1:
        raise ValueError(f"{operation}: recent={recent}: expected at least 1, the query's own token.")


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the type of the autocast that is on, as torch's own attention takes them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)
