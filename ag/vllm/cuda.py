"""vLLM's FlashAttention on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.attention.backends.fa_utils import (
    flash_attn_varlen_func,
    get_flash_attn_version,
    reshape_and_cache_flash,
)
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

from ag.vllm.backend import EvictionBackend, Sequences


class FlashKernels:
    """FlashAttention over pages whose heads lie one after another.

    A step runs between CUDA graphs, as all attention of vLLM's piecewise graphs does: its tensors may be new in each.
    """

    def __init__(self, dtype: torch.dtype, block_size: int, head_size: int) -> None:
        self.head_size = head_size
        self.version = get_flash_attn_version(head_size=head_size)
        self.scale: Tensor | None = None

    def offsets(self, block_size: int) -> Tensor:
        """Return where the numbers of a token lie within a mini: one after another."""
        return torch.arange(block_size * 2 * self.head_size).view(block_size, -1)

    def plan(self, heads: int, kv_heads: int, lengths: Tensor, starts: Tensor) -> None:
        """Return None: the kernel plans for itself."""

    def write(self, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Store keys and values."""
        if self.scale is None:
            self.scale = torch.ones((), dtype=torch.float32, device=k.device)
        keys, values = self._parts(cache)
        reshape_and_cache_flash(k, v, keys, values, slots, "auto", self.scale, self.scale)

    def attend(self, q: Tensor, cache: Tensor, output: Tensor, sequences: Sequences, layer: int, scale: float) -> None:
        """Write the attention outputs."""
        table, lengths, _ = sequences.of(layer)
        keys, values = self._parts(cache)
        flash_attn_varlen_func(
            q=q,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=sequences.starts,
            max_seqlen_q=sequences.longest_query,
            seqused_k=lengths,
            max_seqlen_k=sequences.longest,
            softmax_scale=scale,
            causal=True,
            block_table=table,
            fa_version=self.version,
        )

    def _parts(self, cache: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values ``[B, N, H, D]``; the strides of one head are those of a whole cache."""
        blocks, heads, size, width = cache.shape
        strides = (cache.stride(0), cache.stride(2), size * width, 1)
        tokens = cache.as_strided((blocks, size, heads, width), strides, cache.storage_offset())
        return tokens[..., : width // 2], tokens[..., width // 2 :]


class FlashEvictionBackend(EvictionBackend, FlashAttentionBackend):
    """vLLM's FlashAttention backend with packed requests."""

    kernels = FlashKernels

    @staticmethod
    def get_name() -> str:
        """Return the name under which vLLM finds a backend that a package brings."""
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layout in which the tokens of a head lie together, and each layer's blocks too."""
        return (KVCacheLayout.LBHNC,)
