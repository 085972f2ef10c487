"""Where the tokens of a request lie: arithmetic that vLLM's scheduler and its workers do each for themselves."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ag import retention
from ag.vllm.settings import Settings


@dataclass(frozen=True)
class Placement:
    """Where an evicted prompt lies, in places of the request's block table.

    Attributes:
        packed: places of the blocks that hold the prompt's rows.
        tail: place from which blocks of new tokens are.
        freed: places of the prompt's blocks that go back to vLLM.
    """

    packed: range
    tail: int
    freed: range

    def places(self, new_tokens: int, block_size: int) -> int:
        """Return the length of the block table for the prompt and ``new_tokens``."""
        return self.tail + -(-new_tokens // block_size)


@dataclass(frozen=True)
class Geometry:
    """What decides how many blocks a prompt keeps.

    Attributes:
        settings: the policy.
        block_size: tokens of a block, N.
        kv_heads: KV heads H of each layer.
        layers: layers of the model, L.
        scored_layers: layers that share the budget; the other ones keep all tokens.
        regions: layers for which vLLM has memory: those of the model, and one of gate logits if there are gates.
        apart: whether rows go to blocks of their own, because the prompt's blocks may be shared or used again (prefix
            caching); else they go to the first blocks of the prompt.
    """

    settings: Settings
    block_size: int
    kv_heads: int
    layers: int
    scored_layers: int
    regions: int
    apart: bool


@functools.lru_cache(maxsize=4096)
def kept_tokens(geometry: Geometry, prompt: int, protected: int) -> int:
    """Return the tokens that a KV head keeps, on average over those that share the budget.

    Args:
        geometry: has the policy.
        prompt: tokens of the prompt.
        protected: first tokens of the prompt that the request protects.
    """
    policy = geometry.settings.made_policy
    assert policy.scorer is not None
    length = torch.tensor([prompt])
    budget = policy.capacity(length)
    marked = torch.arange(prompt)[None] < protected if protected else None
    number = retention.count_protected(length, *policy.scorer.limits(budget), marked)
    return min(int(retention.keep_count(budget, number)), prompt)


@functools.lru_cache(maxsize=4096)
def place(geometry: Geometry, prompt: int, protected: int = 0) -> Placement | None:
    """Return where a prompt lies after eviction. None: eviction would free no block, and the prompt stays whole.

    A row of x tokens takes ceil(x / N) minis. The rows that share the budget have ``kept_tokens * rows`` tokens, which
    bounds their minis however uneven the heads are: by (tokens + rows * (N - 1)) / N.

    Args:
        geometry: of the engine.
        prompt: tokens of the prompt.
        protected: first tokens of the prompt that the request protects.
    """
    size, kept = geometry.block_size, kept_tokens(geometry, prompt, protected)
    rows, whole_minis = geometry.scored_layers * geometry.kv_heads, -(-prompt // size)
    compares = geometry.settings.made_policy.allocator.compares_heads
    minis = rows * (kept + size - 1) // size if compares else rows * -(-kept // size)
    minis = min(minis, rows * whole_minis)
    minis += (geometry.layers - geometry.scored_layers) * geometry.kv_heads * whole_minis
    blocks, full = -(-minis // (geometry.regions * geometry.kv_heads)), prompt // size
    if blocks >= full:
        return None
    if geometry.apart:
        return Placement(range(whole_minis, whole_minis + blocks), whole_minis + blocks, range(whole_minis))
    return Placement(range(blocks), full, range(blocks, full))
