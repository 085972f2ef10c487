"""The state of a scheduler, for the live page and Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Self

import torch

from ag.engine.cache import EvictionCache


@dataclass
class Counts:
    """Totals since the scheduler started."""

    prompts: int = 0  # prompt tokens that the model read
    cached: int = 0  # prompt tokens from a cached prefix, which the model did not read
    steps: int = 0  # decode steps of the batch
    tokens: int = 0  # generated tokens
    num_started: int = 0  # completions that got a first token
    ttft_seconds: float = 0.0  # sum of the times to first token
    drafted: int = 0  # draft tokens that the model read
    accepted: int = 0  # draft tokens that became part of a completion
    preempted: int = 0  # preemptions; the model reads a preempted completion again later
    num_ended: Counter[str] = field(default_factory=Counter)  # completions that ended, by reason; ``error`` is a reason


@dataclass(frozen=True)
class Memory:
    """What a cache holds of completions and their prompts."""

    num_tokens: int = 0  # tokens that the model has read
    num_held: float = 0.0  # those of them that are held, as a mean over the KV heads of all layers
    saved_bytes: int = 0  # bytes of transformers' own cache of these tokens minus those of the blocks, at least 0

    @classmethod
    def of_all(cls, parts: Sequence[Self]) -> Self:
        """Return the memory of several completions together."""
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))

    @property
    def kept_share(self) -> float:
        """Share of the tokens that is held; 1 without tokens."""
        return self.num_held / self.num_tokens if self.num_tokens else 1.0


def memories(cache: EvictionCache) -> list[Memory]:
    """Return the memory of each sequence of a cache. Blocks that several sequences share count for each of them."""
    state, pool = cache.state, cache.setup.pool
    num_tokens, block_nbytes = state.sequences.num_tokens, pool.block_nbytes(state.stores[0].gate_type)
    token_nbytes, num_heads = Counter[int | None](), 0  # bytes of a token in transformers' cache, by sliding window
    for layer, store in zip(state.layers, state.layer_stores, strict=True):
        number, key, value = store.head_shape
        token_nbytes[layer.window] += number * (key + value) * pool.dtype.itemsize
        num_heads += number
    seen = {window: num_tokens if window is None else num_tokens.clamp(max=window - 1) for window in token_nbytes}
    whole_nbytes = torch.stack([seen[window] * nbytes for window, nbytes in token_nbytes.items()]).sum(0)
    taken_nbytes = torch.stack([store.block_counts.sum((0, 2)) for store in state.stores]).sum(0) * block_nbytes
    num_held = torch.stack([store.lengths_cpu.sum((0, 2)) for store in state.stores]).sum(0) / num_heads
    saved_nbytes = (whole_nbytes - taken_nbytes).clamp(min=0)
    return [*map(Memory, num_tokens.tolist(), num_held.tolist(), saved_nbytes.tolist())]


def cached_tokens(cache: EvictionCache) -> list[list[float]]:
    """Return the cached tokens of each sequence, by layer, as a mean over KV heads."""
    num_held = torch.stack([store.lengths_cpu.sum(2) for store in cache.state.stores]).sum(0)
    num_heads = torch.tensor([store.kv_heads for store in cache.state.layer_stores])
    by_layer: list[list[float]] = (num_held / num_heads[:, None]).tolist()
    return by_layer


@dataclass(frozen=True)
class Running:
    """A completion that is being generated."""

    index: int  # number of the completion, in order of submission
    num_prompt_tokens: int  # tokens of its prompt
    num_generated: int  # generated tokens so far
    seconds: float  # since it was submitted
    cached: tuple[float, ...]  # cached tokens per KV head, by layer
    memory: Memory = Memory()  # after the last step, with the rejected drafts of that step


@dataclass(frozen=True)
class Snapshot:
    """The state of a scheduler after a step; ``num_waiting`` is current."""

    num_waiting: int  # completions in the queue
    num_prefilling: int  # completions in prefill
    running: tuple[Running, ...]  # completions in decode
    blocks: int  # capacity of the pool
    free: int  # free blocks
    block_nbytes: int  # bytes of a block
    prefixes: int  # cached prefixes
    prefix_blocks: int  # blocks of cached prefixes; completions may share them
    counts: Counts  # totals so far

    @property
    def memory(self) -> Memory:
        """The memory of all running completions."""
        return Memory.of_all([completion.memory for completion in self.running])
