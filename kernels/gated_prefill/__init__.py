"""Attention within a prompt of which tokens are evicted: for inference, with less work the more is gone."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.gated_attention import gated_attention
from ag.kernels.gated_prefill.chunked import chunked_gated_prefill


def gated_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    key_valid: Tensor | None = None,
    scaling: float | None = None,
    recent: int = 1,
    sinks: int = 0,
    window: int | None = None,
) -> Tensor:
    """Causal attention over the kept keys, the first ``sinks`` and each query's ``recent`` newest ones.

    The result is that of :func:`ag.kernels.gated_attention.gated_attention` with flags of 0 and 1, without gradients.
    On a CPU evicted keys are never met; elsewhere that operation runs, which skips whole blocks of them.

    Args:
        q: queries ``[B, H, T, D]``.
        k: keys ``[B, Hkv, T, D]``, H a multiple of Hkv.
        v: values ``[B, Hkv, T, D]``.
        keep: ``[B, Hkv, T]`` bool, True on the keys that stay.
        key_valid: ``[B, T]`` bool, False on padding; None when there is none.
        scaling: factor of the logits; None is ``D ** -0.5``.
        recent: newest tokens that a query always sees, its own included (at least 1).
        sinks: first tokens of a row that every query sees.
        window: sliding window of the model: pairs with ``j - t >= window`` are invisible, sinks too.

    Returns:
        ``[B, H, T, D]`` in the type of ``q``; zeros for queries that see nothing (padding).

    Raises:
        ValueError: for shapes that do not fit, ``keep`` that is not bool, or ``recent`` below 1.
    """
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    if k.shape != (batch, kv_heads, length, dim) or v.shape[:3] != k.shape[:3] or heads % kv_heads:
        raise ValueError(
            f"gated_prefill: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected q [B, H, T, D] and "
            "k, v [B, Hkv, T, D] with H a multiple of Hkv."
        )
    if keep.shape != (batch, kv_heads, length) or keep.dtype != torch.bool:
        raise ValueError(
            f"gated_prefill: keep {tuple(keep.shape)} {keep.dtype}: expected {(batch, kv_heads, length)}, bool."
        )
    if recent < 1:
        raise ValueError(f"gated_prefill: recent={recent}: expected at least 1, the query's own token.")
    scaling = dim**-0.5 if scaling is None else scaling
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    with torch.no_grad(), torch.autocast(device, enabled=False):
        if device != "cpu":
            return gated_attention(q, k, v, keep.float(), key_valid, scaling, recent, sinks, window)
        return chunked_gated_prefill(q, k, v, keep, key_valid, scaling, recent, sinks, window)
