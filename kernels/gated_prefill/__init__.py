"""Attention within a prompt under eviction, for inference; the work shrinks with the number of kept tokens."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ag.kernels.dispatch import VARIABLE, no_triton, pick
from ag.kernels.gated_attention import checked, gated_attention
from ag.kernels.gated_attention.masks import Masks
from ag.kernels.gated_prefill import chunked
from ag.kernels.softmax import PLAIN, Softmax


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
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Causal attention over the kept keys, the first ``sinks`` and each query's newest ``recent`` keys.

    Result and arguments are as in :func:`ag.kernels.gated_attention.gated_attention` with flags of 0 and 1, without
    gradients; ``keep`` ``[B, Hkv, T]`` is bool, True on kept keys. Evicted keys are read only on the diagonal, by
    Triton on CUDA and in blocks of PyTorch on a CPU. On CUDA without Triton, and as the reference, gated attention
    runs.

    Returns:
        ``[B, H, T, D]`` in the type of ``q``; zeros for queries that see nothing (padding).

    Raises:
        ValueError: shapes do not fit, ``keep`` is not bool, or ``recent`` is below 1.
        UserError: ``AG_KERNELS`` names a version that cannot run (see ag.kernels.dispatch).
    """
    q, k, v = checked("gated_prefill", q, k, v, recent)
    if keep.shape != k.shape[:3] or keep.dtype != torch.bool:
        raise ValueError(f"gated_prefill: keep {tuple(keep.shape)} {keep.dtype}: expected {tuple(k.shape[:3])}, bool.")
    device, scaling = q.device.type, q.shape[-1] ** -0.5 if scaling is None else scaling
    no_card = softmax.bent or no_triton(device, q.dtype, max(q.shape[-1], v.shape[-1]))
    versions = {"triton": no_card, "chunked": None, "reference": None}
    version = pick("gated_prefill", versions, os.environ.get(VARIABLE))
    attend = chunked.gated_prefill
    if version == "triton":
        from ag.kernels.gated_prefill.triton import gated_prefill as attend
    with torch.no_grad(), torch.autocast(device, enabled=False):
        if version == "reference" or (version == "chunked" and device != "cpu"):
            return gated_attention(q, k, v, keep.float(), key_valid, scaling, recent, sinks, window, softmax=softmax)
        return attend(q, k, v, keep, Masks(key_valid, recent, sinks, window), scaling, softmax)
