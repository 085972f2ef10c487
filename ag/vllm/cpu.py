"""vLLM's attention on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

from ag.vllm.backend import EvictionBackend, Sequences
from ag.vllm.pages import measured_offsets


class CPUKernels:
    """The operations of vLLM's CPU backend."""

    def __init__(self, dtype: torch.dtype, block_size: int, head_size: int) -> None:
        self.dtype, self.head_size = dtype, head_size
        self.isa = _get_attn_isa(dtype, block_size, head_size)

    def offsets(self, block_size: int) -> Tensor:
        """Return where the numbers of a token lie within a mini, ``[N, 2 D]`` long."""
        return _offsets(self.isa, block_size, self.head_size, self.dtype)

    def plan(self, heads: int, kv_heads: int, lengths: Tensor, starts: Tensor) -> Any:
        """Return how the kernel shares the work among threads."""
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.head_size,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )

    def write(self, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Store keys and values."""
        write(k, v, cache, slots, self.isa)

    def attend(self, q: Tensor, cache: Tensor, output: Tensor, sequences: Sequences, layer: int, scale: float) -> None:
        """Write the attention outputs."""
        table, lengths, plan = sequences.of(layer)
        keys, values = _halves(cache)
        ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=keys,
            value_cache=values,
            output=output,
            query_start_loc=sequences.starts,
            seq_lens=lengths,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0,
            scheduler_metadata=plan,
            s_aux=None,
        )


class CPUEvictionBackend(EvictionBackend, CPUAttentionBackend):
    """vLLM's CPU backend with packed requests."""

    kernels = CPUKernels

    @staticmethod
    def get_name() -> str:
        """Return the name under which the CPU platform finds its backend."""
        return "CPU_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the sizes of blocks: small ones lose less at the end of each row."""
        return [MultipleOf(16)]


def write(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, isa: str) -> None:
    """Store keys and values ``[T, H, D]`` by their slots in a cache ``[B, H, N, 2 D]``."""
    keys, values = _halves(cache)
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa)


def _halves(cache: Tensor) -> tuple[Tensor, ...]:
    blocks, heads, size, _ = cache.shape
    return cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)


@functools.cache
def _offsets(isa: str, block_size: int, size: int, dtype: torch.dtype) -> Tensor:
    return measured_offsets(functools.partial(write, isa=isa), block_size, size, dtype)
