"""When a request is evicted from, and where its tokens lie; vLLM's scheduler and its workers each compute this."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ag import retention
from ag.errors import UserError
from ag.vllm.settings import PROTECT, Settings, protected_tokens


@dataclass(frozen=True)
class Schedule:
    """When a request is due for eviction: :class:`ag.engine.sequences.SequenceState`'s rule, for one token at a time.

    Attributes:
        prompt: tokens of the prompt.
        full: tokens of the text from which steps count: those of the prompt, or the budget if that is more.
        block: tokens of the prompt between evictions. None: its end alone.
        steps: tokens after the prompt between evictions. None: nothing is evicted there.
    """

    prompt: int
    full: int
    block: int | None
    steps: int | None

    def after(self, tokens: int) -> int | None:
        """Return at how many tokens of the text, more than ``tokens``, an eviction is due; None: never again."""
        if tokens < self.prompt:
            return self.prompt if self.block is None else min((tokens // self.block + 1) * self.block, self.prompt)
        if self.steps is None:
            return None
        return self.full + (max(tokens - self.full, 0) // self.steps + 1) * self.steps


@dataclass(frozen=True)
class Placement:
    """When a request is evicted from, and where it lies then, in places of its block table.

    Until the first eviction the request is whole, in vLLM's own blocks. Each eviction packs its rows into the blocks
    at ``packed``. New tokens follow in the blocks from ``tail`` on, which stay for the tokens after the next eviction.

    Attributes:
        schedule: when evictions are due.
        first: tokens of the text at the first eviction that finds something to evict.
        whole_blocks: blocks of this text.
        packed: places of the blocks that hold the rows.
        tail: place from which blocks of new tokens are.
        freed: by tokens of the text, places whose blocks go back to vLLM once the eviction at that number is over.
    """

    schedule: Schedule
    first: int
    whole_blocks: int
    packed: range
    tail: int
    freed: Mapping[int, range]

    def chunk_end(self, tokens: int) -> int | None:
        """Return where a chunk that begins after so many tokens of the text ends at the latest; None: anywhere."""
        return self.first if tokens < self.first else self.schedule.after(tokens)

    def evicts_at(self, tokens: int) -> bool:
        """Return whether an eviction is due when so many tokens of the text were read."""
        return self.chunk_end(tokens - 1) == tokens

    def places(self, tokens: int, block_size: int) -> int:
        """Return the length of the block table for so many tokens of the text."""
        if tokens <= self.first:
            return -(-tokens // block_size)
        # The tail holds the new tokens since the last eviction: those of the prompt behind `first`, or of the answer.
        # A table never shrinks, so that it is as long as the longest run of tokens between evictions so far.
        prompt, block, steps = self.schedule.prompt, self.schedule.block, self.schedule.steps
        in_prompt, in_answer = min(tokens, prompt) - self.first, tokens - max(self.first, prompt)
        in_prompt = in_prompt if block is None else min(in_prompt, block)
        in_answer = in_answer if steps is None else min(in_answer, steps)
        longest_run = max(in_prompt, in_answer)
        return max(self.whole_blocks, self.tail + -(-longest_run // block_size))


@dataclass(frozen=True)
class Geometry:
    """What decides how many blocks a request keeps.

    Attributes:
        settings: the policy.
        block_size: tokens of a block, N.
        kv_heads: KV heads H of each layer.
        layers: layers of the model, L.
        scored_layers: layers that share the budget; the other ones keep all tokens.
        longest: tokens of the longest text.
        apart: whether rows go to blocks of their own, because the prompt's blocks may be shared or used again (prefix
            caching); else they go to the first blocks of the prompt.
    """

    settings: Settings
    block_size: int
    kv_heads: int
    layers: int
    scored_layers: int
    longest: int
    apart: bool

    @property
    def evicts_again(self) -> bool:
        """Whether packed rows are evicted from, so that their tokens need their logits and indices."""
        return self.settings.made_policy.schedule != "prefill"

    @property
    def regions(self) -> int:
        """Number of layers whose pages rows may use; gate logits count as one layer if they are not needed again."""
        return self.layers + (self.settings.made_policy.gates is not None and not self.evicts_again)


@functools.lru_cache(maxsize=4096)
def kept_tokens(geometry: Geometry, prompt: int, protected: int, tokens: int) -> int:
    """Return the tokens that a KV head keeps at most, on average over those that share the budget.

    Args:
        geometry: has the policy.
        prompt: tokens of the prompt.
        protected: first tokens of the prompt that the request protects.
        tokens: of the text so far.
    """
    budget, counts = _budget_and_protected(geometry, prompt, protected, tokens)
    return max(budget, *counts)


@functools.lru_cache(maxsize=4096)
def place(geometry: Geometry, prompt: int, protected: int = 0) -> Placement | None:
    """Return where a request lies after evictions. None: none frees a block, and the request stays whole.

    A row of x tokens takes ceil(x / N) minis. The rows that share the budget have ``kept_tokens * rows`` tokens, which
    bounds their minis however uneven the heads are: by (tokens + rows * (N - 1)) / N.

    Args:
        geometry: of the engine.
        prompt: tokens of the prompt.
        protected: first tokens of the prompt that the request protects.
    """
    size, policy = geometry.block_size, geometry.settings.made_policy
    budget, (protected_at_prompt, protected_at_longest) = _budget_and_protected(
        geometry, prompt, protected, prompt, geometry.longest
    )
    schedule = Schedule(prompt, max(prompt, budget), policy.block, policy.steps)
    first = schedule.after(0)
    while first is not None and kept_tokens(geometry, prompt, protected, first) >= first:
        first = schedule.after(first) if first < geometry.longest else None
    if first is None:
        return None
    rows, whole_blocks = geometry.scored_layers * geometry.kv_heads, -(-first // size)
    kept = max(budget, protected_at_prompt)
    if policy.steps is not None:  # a layer keeps its total, or the protected tokens if these have become more
        kept = min(kept + protected_at_longest - protected_at_prompt, geometry.longest)
    minis = rows * (kept + size - 1) // size if policy.allocator.compares_heads else rows * -(-kept // size)
    if not geometry.evicts_again:
        minis = min(minis, rows * whole_blocks)
    minis += (geometry.layers - geometry.scored_layers) * geometry.kv_heads * whole_blocks
    blocks = -(-minis // (geometry.regions * geometry.kv_heads))
    if not geometry.evicts_again and blocks >= prompt // size:
        return None
    following, steps = schedule.after(first), policy.steps or geometry.longest
    if geometry.apart:
        packed, tail, freed = range(whole_blocks, whole_blocks + blocks), whole_blocks + blocks, range(whole_blocks)
    else:  # new tokens go to blocks that the rows left, as many as they need until the next eviction
        tail = max(blocks, whole_blocks - (1 if following is None else -(-(following - first) // size)))
        packed, freed = range(blocks), range(blocks, tail)
    placement = Placement(schedule, first, whole_blocks, packed, tail, {first: freed})
    if first < prompt:  # the answer may need fewer blocks until its next eviction than the prompt
        tail_blocks = range(tail + -(-steps // size), placement.places(prompt, size))
        placement = replace(placement, freed={first: freed, prompt: tail_blocks})
    return placement


def place_request(geometry: Geometry, params: Any, prompt: int) -> Placement | None:
    """Return where a request of vLLM lies after evictions. None: it stays whole.

    vLLM's cache may have no more than :func:`most_blocks`. A request that needs more, because it protects many tokens,
    would wait for ever, and all requests behind it: it stays whole, if its whole text needs no more.

    Args:
        geometry: of the engine.
        params: vLLM's sampling parameters of the request. None: it has none.
        prompt: tokens of the prompt.

    Raises:
        UserError: the request may need more blocks than there are, packed and whole.
    """
    protected, size = protected_tokens(params, prompt), geometry.block_size
    placement = place(geometry, prompt, protected)
    if placement is None or not protected:
        return placement
    answer = getattr(params, "max_tokens", None)
    text = geometry.longest if answer is None else min(prompt + answer, geometry.longest)
    packed, whole, most = placement.places(text, size), -(-text // size), most_blocks(geometry)
    if packed <= most:
        return placement
    if whole <= most:
        return None
    raise UserError(
        f"{PROTECT}={protected} of a prompt of {prompt} tokens: the request may need {min(packed, whole)} blocks of "
        f"{size} tokens: expected at most {most}, as many as one that protects nothing may need; protect fewer tokens."
    )


@functools.lru_cache(maxsize=64)
def most_blocks(geometry: Geometry) -> int:
    """Return the most blocks that a request needs, up to the longest text, if it protects nothing."""
    size, longest = geometry.block_size, geometry.longest
    # A long answer; or a long prompt in its first packed pass, of any number of tokens in the last block.
    prompts = [1, *range(max(1, longest - size), longest + 1)]
    if geometry.settings.made_policy.block is not None:
        # Rows and answer lie side by side in the end. A longer prompt has more rows: the worst is, for each number of
        # blocks of the answer, the longest prompt.
        prompts += range(longest - 1, 0, -size)
    placements = (place(geometry, prompt) for prompt in prompts)
    return max(-(-longest // size) if x is None else x.places(longest + 1, size) for x in placements)


def _budget_and_protected(geometry: Geometry, prompt: int, protected: int, *tokens: int) -> tuple[int, tuple[int, ...]]:
    """Return the budget of a KV head, and for each number of tokens of the text how many of these are protected."""
    scorer, length = geometry.settings.made_policy.scorer, torch.tensor([prompt])
    assert scorer is not None
    budget = geometry.settings.made_policy.capacity(length)
    marked = torch.ones(len(tokens), protected, dtype=torch.bool) if protected else None
    counts = retention.count_protected(torch.tensor(tokens), *scorer.limits(budget), marked)
    return int(budget), tuple(counts.tolist())
