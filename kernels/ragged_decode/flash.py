"""Decoding over ragged rows by flash-attn: each (sequence, KV head) is an element of its batch, read where it lies."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

INSTALLED = importlib.util.find_spec("flash_attn") is not None


def unavailable(keys: Tensor, values: Tensor) -> str | None:
    """Return why flash-attn cannot run on such keys and values, or None."""
    if not INSTALLED:
        return "flash-attn is not installed (pip install 'ag[flash]')"
    if keys.device.type != "cuda":
        return f"the tensors are on {keys.device.type}"
    if keys.dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn computes in bfloat16 and float16, not in {keys.dtype}"
    dim, width = keys.shape[-1], values.shape[-1]
    return None if dim == width <= 256 else f"keys of {dim} and values of {width} are not of one size up to 256"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def flash_ragged_decode(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, scaling: float
) -> Tensor:
    """Compute :func:`ag.kernels.ragged_decode.ragged_decode` with flash-attn's kernel for sequences of any length.

    The offsets that it takes say where a row begins, and ``seqused_k`` how much of it there is, so that rows may have
    free slots between them. Its paged call would want them in pages of 256 tokens, more than many rows hold.
    """
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    batch, heads, dim = q.shape
    rows, slots = len(starts), len(keys)
    out: Tensor = _flash_attn_varlen_forward(
        q.reshape(rows, -1, dim),
        keys[:, None],
        values[:, None],
        cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=q.device),
        cu_seqlens_k=nn.functional.pad(starts, (0, 1), value=slots).int(),
        max_seqlen_q=1,
        max_seqlen_k=slots,
        dropout_p=0.0,
        softmax_scale=scaling,
        causal=False,
        seqused_k=lengths.int(),
    )[0]
    return out.masked_fill((lengths == 0)[:, None, None], 0.0).view(batch, heads, -1)
