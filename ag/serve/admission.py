"""Upper bounds of the blocks that a request takes, computed before its prompt is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ag import retention
from ag.engine.allocators.uniform import Uniform
from ag.engine.cache import EvictionCache
from ag.engine.layer import EXPIRED
from ag.model.geometry import sliding_windows
from ag.serve.request import Request

MARGIN = 1.25  # factor on the share that flags have kept of earlier prompts


@dataclass(frozen=True)
class BlockNeed:
    """The most blocks of one answer."""

    prefill: int  # while its prompt is read
    decode: int  # afterwards


class Admission:
    """Bounds the blocks of requests.

    The bound is exact or too large under a budget and under ``full``. Under flags it is an estimate: the share kept of
    earlier prompts times :data:`MARGIN`, and the whole answer.

    Args:
        cache: an eviction cache of the model and the policy.
        config: of the model.
        part: most tokens of a prompt that are read at once.
    """

    def __init__(self, cache: EvictionCache, config: PretrainedConfig, max_chunk: int) -> None:
        self.policy, self.max_chunk = cache.policy, max_chunk
        self._rows = [(store.kv_heads, store.block) for store in cache.store_of]  # of each layer; tokens of a block
        self._sliding_windows = sliding_windows(config)
        self._budget_layers = set(cache.sharing)
        self._by_flags = self.policy.by_gates and self.policy.budget is None
        self._uniform = isinstance(self.policy.allocator, Uniform) and not self._by_flags
        self._kept_tokens = self._prompt_tokens = (
            0.0  # tokens per KV head that flags kept of prompts, and tokens of those prompts
        )

    def record_kept_share(self, cache: EvictionCache, tokens: int) -> None:
        """Record what flags have kept of a prompt of this number of tokens."""
        if self._by_flags:
            rows = len(cache.sequences) * sum(store.kv_heads for store in cache.store_of)
            self._kept_tokens += sum(float(store.held.sum()) for store in cache.stores) / rows
            self._prompt_tokens += tokens

    def need(self, request: Request) -> BlockNeed:
        """Return the bound of one answer, its prompt included; its last token is never read and takes no block."""
        policy, num_prompt, num_decoded = self.policy, len(request.tokens), max(request.num_reserved - 1, 0)
        reconstruction, protected = self._reconstruction_tokens(request), request.protected_mask()
        # the most tokens per KV head, as a mean over heads, while the prompt is read in chunks and afterwards
        prefill_tokens, decode_tokens = num_prompt, num_prompt + num_decoded
        if self._by_flags and self._prompt_tokens:
            decode_tokens = (
                min(
                    num_prompt,
                    int(MARGIN * num_prompt * self._kept_tokens / self._prompt_tokens) + int(protected.sum()),
                )
                + num_decoded
            )
        elif policy.budget is not None:
            if policy.block is not None:
                prefill_tokens = min(num_prompt, self._capacity(protected, num_prompt) + policy.block)
            if policy.steps is None:
                decode_tokens = min(num_prompt, self._capacity(protected, num_prompt)) + num_decoded
            else:  # ``every`` evicts one step late
                decode_tokens = min(
                    decode_tokens, self._capacity(protected, decode_tokens) + min(num_decoded, max(policy.steps, 2))
                )
        return BlockNeed(
            prefill=self._blocks(
                prefill_tokens + reconstruction, num_prompt + reconstruction, EXPIRED + self.max_chunk
            ),
            decode=self._blocks(decode_tokens, num_prompt + num_decoded, min(num_decoded, EXPIRED)),
        )

    def full_cache_tokens(self, blocks: int) -> int:
        """Return the tokens per KV head whose keys and values take this number of blocks if no layer evicts any."""
        return int(blocks / sum(heads / size for heads, size in self._rows))

    def max_concurrent(self, request: Request, blocks: int) -> int:
        """Return how many such requests are answered at once in a pool of this number of blocks."""
        need = self.need(request)
        return max(0, 1 + (blocks - max(need.prefill, need.decode)) // need.decode)

    def _capacity(self, protected: Tensor, num_tokens: int) -> int:
        """Return the tokens per KV head after an eviction: the budget, or the protected tokens if those are more.

        Args:
            protected: ``[T]`` bool, the tokens of the prompt that the request protects.
            num_tokens: tokens of the text.
        """
        assert self.policy.scorer is not None
        budget = self.policy.capacity(torch.tensor([len(protected)]))
        num_protected = retention.count_protected(
            torch.tensor([num_tokens]), *self.policy.scorer.limits(budget), protected[None]
        )
        return int(retention.keep_count(budget, num_protected))

    def _reconstruction_tokens(self, request: Request) -> int:
        """Return the most tokens that the cache holds beside a prompt while a scorer rereads it."""
        rereader = None if self.policy.scorer is None else self.policy.scorer.rereader
        inputs = [] if rereader is None else rereader.inputs([*request.tokens])
        return max((len(repeated_tokens) for _, repeated_tokens in inputs), default=0)

    def _blocks(self, tokens: int, unevicted: int, expired_slack: int) -> int:
        """Return the blocks of all layers.

        Args:
            tokens: mean tokens per KV head in layers under the budget.
            unevicted: tokens per KV head in the other layers without a sliding window.
            expired_slack: tokens that a layer with a sliding window may hold beyond its window.
        """
        blocks, budget_heads, block_sizes = 0, 0, [block_size for _, block_size in self._rows]
        for layer, (sliding_window, (heads, block_size)) in enumerate(
            zip(self._sliding_windows, self._rows, strict=True)
        ):
            layer_tokens = unevicted if sliding_window is None else min(unevicted, sliding_window - 1 + expired_slack)
            if layer not in self._budget_layers or tokens >= unevicted:
                blocks += heads * -(-layer_tokens // block_size)
            elif self._uniform:
                blocks += heads * -(-min(tokens, layer_tokens) // block_size)
            else:
                budget_heads += heads
        # tokens may lie where blocks have the fewest, and each of the unequal rows may have a last block with one token
        min_size, max_size = min(block_sizes), max(block_sizes)
        return blocks + budget_heads * (tokens * max_size + (max_size - 1) * min_size) // (min_size * max_size)
