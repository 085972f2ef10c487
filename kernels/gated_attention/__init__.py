"""Attention to keys with keep flags, for training and prefill under gates."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ag.kernels.dispatch import VARIABLE, no_triton, pick
from ag.kernels.gated_attention import chunked, reference
from ag.kernels.gated_attention.masks import Masks
from ag.kernels.softmax import PLAIN, Softmax


def gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    key_valid: Tensor | None = None,
    scaling: float | None = None,
    recent: int = 1,
    sinks: int = 0,
    window: int | None = None,
    dense_until: Tensor | None = None,
    first: Tensor | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Causal attention with flags: query j gives key t the weight ``m_jt exp(s_jt)`` (renormalised).

    ``A_jt = m_jt e^{s_jt} / sum_u m_ju e^{s_ju}``, where ``m_jt`` is 1 for a protected pair, else ``keep[t]``. A pair
    is protected if ``j - t < recent``, if t is a sink, or if ``j < dense_until``. With flags of 0 and 1 this equals
    masked attention. The gradient of the flags stays finite and reaches evicted tokens: gates can open again. For a
    flag of exactly 0 the factor ``e^{s - lse}`` of this gradient is at most 1, because for an evicted attention sink it
    would be astronomically large.

    Triton runs it on CUDA, PyTorch in tiles elsewhere; ``AG_KERNELS`` forces a version (see ag.kernels.dispatch).

    Args:
        q: queries ``[B, H, T, D]``.
        k: keys ``[B, Hkv, T, D]``, H a multiple of Hkv.
        v: values ``[B, Hkv, T, D]``.
        keep: keep flags in [0, 1], ``[B, Hkv, T]``, hard or soft. None: every key is kept.
        key_valid: ``[B, T]`` bool, False on padding. None: no padding.
        scaling: factor of the logits. None: ``D ** -0.5``.
        recent: newest tokens that a query always sees, its own included (at least 1).
        sinks: number of first tokens of a row, or with ``first`` of each document, that every query sees.
        window: sliding window of the model: pairs with ``j - t >= window`` are invisible, sinks too. None: no window.
        dense_until: ``[B]`` long; queries with a smaller index ignore ``keep``. None: flags act on every query.
        first: ``[B, T]`` long; the first column that each query may see: in a packed row, the start of its document.
            It never decreases along a row. For padding it may be a later column. None: a row is one document.
        softmax: cap of the logits, which Triton's version does not support, and sink logits.

    Returns:
        ``[B, H, T, D]`` in the type of ``q``; zeros for queries that see nothing (padding).

    Raises:
        ValueError: shapes do not fit, or ``recent`` is below 1.
        UserError: ``AG_KERNELS`` names a version that cannot run.
    """
    q, k, v = checked("gated_attention", q, k, v, recent)
    if keep is not None and keep.shape != k.shape[:3]:
        raise ValueError(f"gated_attention: keep {tuple(keep.shape)}: expected {tuple(k.shape[:3])}.")
    if first is not None and first.shape != (q.shape[0], q.shape[2]):
        raise ValueError(f"gated_attention: first {tuple(first.shape)}: expected {(q.shape[0], q.shape[2])}.")
    device, scaling = q.device.type, q.shape[-1] ** -0.5 if scaling is None else scaling
    no_card = softmax.bent or no_triton(device, q.dtype, max(q.shape[-1], v.shape[-1]))
    versions = {"triton": no_card, "chunked": None, "reference": None}
    version = pick("gated_attention", versions, os.environ.get(VARIABLE))
    attend = chunked.gated_attention if version == "chunked" else reference.gated_attention
    if version == "triton":
        from ag.kernels.gated_attention.triton import gated_attention as attend
    with torch.autocast(device, enabled=False):
        return attend(q, k, v, keep, Masks(key_valid, recent, sinks, window, dense_until, first), scaling, softmax)


def checked(operation: str, q: Tensor, k: Tensor, v: Tensor, recent: int) -> tuple[Tensor, Tensor, Tensor]:
    """Check the shapes, and return q, k and v in the types that torch's autocast gives to attention.

    Raises:
        ValueError: q is not ``[B, H, T, D]``, k or v not ``[B, Hkv, T, D]``, or a query does not see its own token.
    """
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    if k.shape != (batch, kv_heads, length, dim) or v.shape[:3] != k.shape[:3] or heads % kv_heads:
        raise ValueError(
            f"{operation}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected q [B, H, T, D] and "
            "k, v [B, Hkv, T, D] with H a multiple of Hkv."
        )
    if recent < 1:
        raise ValueError(f"{operation}: recent={recent}: expected at least 1, the query's own token.")
    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)
