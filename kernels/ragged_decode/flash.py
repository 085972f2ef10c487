"""Decoding over ragged rows by PyTorch's flash attention: each row is an element of its batch, read where it lies."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def unavailable(q: Tensor, keys: Tensor, values: Tensor) -> str | None:
    """Return why the flash version cannot run on such queries, keys and values, or None."""
    if keys.device.type != "cuda":
        return f"the tensors are on {keys.device.type}"
    if keys.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == keys.dtype == values.dtype:
        return f"it computes in one of bfloat16 and float16, not on {q.dtype}, {keys.dtype} and {values.dtype}"
    dim, width = keys.shape[-1], values.shape[-1]
    if dim != width or dim > 256 or dim % 8:
        return f"keys of {dim} and values of {width} are not of one size up to 256, a multiple of 8"
    if _varlen_attn() is None:
        return f"torch.nn.attention.varlen of torch {torch.__version__} does not take seqused_k (torch 2.12 does)"
    return None


@functools.cache
def _varlen_attn() -> Callable[..., Any] | None:
    """Return PyTorch's attention for sequences of any length where it can read a part of each; else None."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn if {"seqused_k", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys() else None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def flash_ragged_decode(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, scaling: float, longest: int
) -> Tensor:
    """Compute :func:`ag.kernels.ragged_decode.ragged_decode` with ``torch.nn.attention.varlen.varlen_attn``.

    The offsets that it takes say where a row begins, and ``seqused_k`` how much of it there is, so that rows may have
    free slots between them. It splits rows by ``longest``, so that few long ones fill a card too.
    """
    attend = _varlen_attn()
    assert attend is not None
    batch, heads, dim = q.shape
    rows = len(starts)
    out: Tensor = attend(
        q.reshape(rows, -1, dim),
        keys[:, None],
        values[:, None],
        cu_seq_q=torch.arange(rows + 1, dtype=torch.int32, device=q.device),
        cu_seq_k=nn.functional.pad(starts, (0, 1), value=len(keys)).int(),
        max_q=1,
        max_k=longest,
        scale=scaling,
        enable_gqa=True,
        seqused_k=lengths.int(),
    )
    return out.masked_fill((lengths == 0)[:, None, None], 0.0).view(batch, heads, -1)
