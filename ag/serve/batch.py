"""What the scheduler schedules: completions, prompts in prefill, and the batch of each policy."""

from __future__ import annotations

import sys
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from ag.engine.block_pool import Pool
from ag.engine.cache import EvictionCache
from ag.engine.policy import Policy
from ag.engine.step_runner import StepRunner
from ag.serve.admission import Admission, BlockNeed
from ag.serve.prefix_cache import PrefixCache, key_of
from ag.serve.request import Request, Token
from ag.serve.sampler import Sampler
from ag.serve.stream import Stream


@dataclass(eq=False)
class Completion:
    """A completion that is queued, in prefill, or in the batch."""

    index: int  # number of the completion, in order of submission
    request: Request
    stream: Stream  # receives the tokens
    sampler: Sampler
    token_ids: Tensor  # ``[T]`` on the CPU: the prompt and the completion so far
    submitted_at: float  # seconds of the scheduler's clock
    block_need: BlockNeed  # upper bound of its blocks
    end_tokens: Set[int]  # ids of tokens that end it
    batch: Batch  # the batch that it joins
    matcher: Any  # its grammar's matcher, which has read the generated tokens; None: free text
    num_computed_tokens: int = 0  # number of ``token_ids`` in the cache, while in the batch

    @property
    def prompt(self) -> Tensor:
        """Ids of the prompt."""
        return self.token_ids[: len(self.request.tokens)]

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids) - len(self.request.tokens)

    def key(self) -> Tensor:
        """Return the key of ``token_ids``, see :mod:`ag.serve.prefix_cache`."""
        rope, num_prompt = self.batch.cache.setup.rope, torch.tensor(len(self.request.tokens))
        frequencies = 0 if rope is None else int(rope.set_of(num_prompt))
        return key_of(self.token_ids, self.request.protected_mask(), frequencies)

    def next_token_ids(self, max_drafts: int) -> Tensor:
        """Return the next ids to read: the first unread token, then up to ``max_drafts`` unread or draft tokens."""
        token_ids = self.token_ids[self.num_computed_tokens :][: 1 + max_drafts]
        num_drafts = min(1 + max_drafts - len(token_ids), self.request.max_tokens - self.num_generated - 1)
        if num_drafts <= 0 or self.num_computed_tokens + len(token_ids) < len(self.token_ids):
            return token_ids
        lookup = PromptLookupCandidateGenerator(num_output_tokens=num_drafts, max_length=sys.maxsize)
        candidates, _ = lookup.get_candidates(cast("Any", self.token_ids[None]))
        return torch.cat([token_ids, candidates[0, len(self.token_ids) :]])


@dataclass(eq=False)
class PrefillJob:
    """A prompt in prefill, chunk by chunk."""

    completions: list[Completion]  # completions to the prompt
    cache: EvictionCache  # has read ``num_computed_tokens`` tokens
    num_computed_tokens: int  # prompt tokens in the cache
    num_cached_tokens: int  # prompt tokens from a cached prefix
    cache_prefix_at: int  # length at which the prefix is cached for later prompts; 0: it is not cached
    #: Prompt tokens with log-probabilities, if these were requested.
    scored_tokens: list[Token] = field(default_factory=list)


class Batch:
    """The running completions under one policy, in one cache."""

    def __init__(
        self, model: PreTrainedModel, policy: Policy, pool: Pool, prefill_tokens: int, prompt_lookup: int
    ) -> None:
        self.policy, self.cache = policy, EvictionCache(model, policy, pool=pool)
        self.step_runner = StepRunner(model, self.cache)
        state, setup, gates = self.cache.state, self.cache.setup, self.cache.gates
        croppable = self.cache.is_croppable and state.states is None  # rejected drafts differ by sequence
        self.max_drafts = prompt_lookup if croppable else 0
        self.running: list[Completion] = []  # in order of the cache's sequences
        moves = policy.positions == "slot" and setup.prompt_sees == "sparse"
        #: Whether prompts are read in one pass: chunks would be evicted differently, read slowly, or refused.
        self.whole_prompt = state.sequences.goes_on is False or (
            gates is not None and (gates.config.scope == "prompt" or moves)
        )
        #: Prefixes that later prompts start from. None: they would differ by the tokens that follow, and none is kept.
        self.prefixes = None if self.whole_prompt or policy.block is not None else PrefixCache(pool)
        self.admission = Admission(self.cache, model.config, sys.maxsize if self.whole_prompt else prefill_tokens)
