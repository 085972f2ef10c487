"""Upper bounds of the blocks that a request takes, computed before its prompt is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ag import retention
from ag.engine.allocators.uniform import Uniform
from ag.engine.cache import EvictionCache
from ag.engine.layer import MAX_EXPIRED
from ag.model.geometry import sliding_windows
from ag.serve.request import Request

REQUEST = 4096  # tokens of the example request of a capacity; fewer if the context is shorter
ANSWER = 8  # one eighth of the example request is its completion
MARGIN = 1.25  # factor on the kept share of earlier prompts


@dataclass(frozen=True)
class BlockNeed:
    """Upper bounds of the blocks of one completion."""

    prefill: int  # during prefill
    decode: int  # during decode


class Admission:
    """Bounds the blocks of requests.

    Under a budget and under ``full`` no completion exceeds its bound. Under flags the bound is an estimate: the kept
    share of earlier prompts times :data:`MARGIN`, and the whole completion.

    Args:
        cache: an eviction cache of the model and the policy.
        config: the model's configuration.
        max_chunk: largest number of prompt tokens of one pass.
    """

    def __init__(self, cache: EvictionCache, config: PretrainedConfig, max_chunk: int) -> None:
        self.policy, self.max_chunk = cache.policy, max_chunk
        #: By layer, the number of KV heads and the tokens of a block.
        self._rows = [(store.kv_heads, store.block_size) for store in cache.state.layer_stores]
        self._sliding_windows = sliding_windows(config)
        self._budget_layers = set(cache.setup.budget_layers)
        self._by_flags = self.policy.by_gates and self.policy.budget is None
        self._uniform = isinstance(self.policy.allocator, Uniform) and not self._by_flags
        # sums over earlier prompts: tokens per KV head that flags kept, and all tokens
        self._kept_tokens = self._prompt_tokens = 0.0

    def record_kept_share(self, cache: EvictionCache, tokens: int) -> None:
        """Record how much of a prompt of ``tokens`` tokens the flags kept."""
        if self._by_flags:
            rows = len(cache.state.sequences) * sum(store.kv_heads for store in cache.state.layer_stores)
            self._kept_tokens += sum(float(store.lengths_cpu.sum()) for store in cache.state.stores) / rows
            self._prompt_tokens += tokens

    def need(self, request: Request) -> BlockNeed:
        """Return the bound of one completion with its prompt. The last token is never read and takes no block."""
        policy, num_prompt, num_decoded = self.policy, len(request.tokens), max(request.num_reserved - 1, 0)
        reconstruction, protected = self._reconstruction_tokens(request), request.protected_mask()
        # upper bounds of the mean tokens per KV head during prefill and during decode
        prefill_tokens, decode_tokens = num_prompt, num_prompt + num_decoded
        if self._by_flags and self._prompt_tokens:
            kept_tokens = int(MARGIN * num_prompt * self._kept_tokens / self._prompt_tokens) + int(protected.sum())
            decode_tokens = min(num_prompt, kept_tokens) + num_decoded
        elif policy.budget is not None:
            if policy.block is not None:
                prefill_tokens = min(num_prompt, self._capacity(protected, num_prompt) + policy.block)
            if policy.steps is None:
                decode_tokens = min(num_prompt, self._capacity(protected, num_prompt)) + num_decoded
            else:  # ``every`` evicts one step later
                over_budget = min(num_decoded, max(policy.steps, 2))
                decode_tokens = min(decode_tokens, self._capacity(protected, decode_tokens) + over_budget)
        unevicted = num_prompt + reconstruction
        return BlockNeed(
            prefill=self._blocks(prefill_tokens + reconstruction, unevicted, MAX_EXPIRED + self.max_chunk),
            decode=self._blocks(decode_tokens, num_prompt + num_decoded, min(num_decoded, MAX_EXPIRED)),
        )

    def max_concurrent(self, request: Request, blocks: int) -> int:
        """Return how many copies of a request can run at once in a pool of ``blocks`` blocks."""
        need = self.need(request)
        return max(0, 1 + (blocks - max(need.prefill, need.decode)) // need.decode)

    def capacity_text(self, blocks: int, context_length: int | None, batch: int | None = None) -> str:
        """Return what fits into a pool of ``blocks`` blocks: tokens without eviction, and example requests.

        Args:
            blocks: blocks of the pool.
            context_length: largest number of tokens of a sequence. None: no limit.
            batch: largest number of requests at once. None: no limit.
        """
        length = min(REQUEST, context_length or REQUEST)
        request = Request(tokens=[0] * (length - length // ANSWER), max_tokens=length // ANSWER)
        fits, tokens = (
            self.max_concurrent(request, blocks),
            int(blocks / sum(heads / size for heads, size in self._rows)),
        )
        return (
            f"memory for {tokens:,} tokens of a whole cache: fits "
            f"{fits if batch is None else min(fits, batch)} requests of {length:,} tokens "
            f"({request.max_tokens:,} of the answer)"
        )

    def _capacity(self, protected: Tensor, num_tokens: int) -> int:
        """Return the tokens per KV head after an eviction: the budget, or the protected tokens if these are more.

        ``protected`` ``[T]`` bool are the prompt tokens that the request protects, ``num_tokens`` all tokens so far.
        """
        assert self.policy.scorer is not None
        budget = self.policy.capacity(torch.tensor([len(protected)]))
        num_protected = retention.count_protected(
            torch.tensor([num_tokens]), *self.policy.scorer.limits(budget), protected[None]
        )
        return int(retention.keep_count(budget, num_protected))

    def _reconstruction_tokens(self, request: Request) -> int:
        """Return how many tokens of a reconstruction pass are cached at once beside the prompt."""
        scorer = self.policy.reconstruction_scorer
        chunks = [] if scorer is None else scorer.chunks_to_repeat([*request.tokens])
        return max((len(repeated_tokens) for _, repeated_tokens in chunks), default=0)

    def _blocks(self, tokens: int, unevicted: int, expired_slack: int) -> int:
        """Return the blocks of all layers.

        Args:
            tokens: mean tokens per KV head in layers under the budget.
            unevicted: tokens per KV head in layers without eviction and without a sliding window.
            expired_slack: expired tokens that a layer with a sliding window may still hold.
        """
        blocks, budget_heads, block_sizes = 0, 0, [block_size for _, block_size in self._rows]
        layers = enumerate(zip(self._sliding_windows, self._rows, strict=True))
        for layer, (sliding_window, (heads, block_size)) in layers:
            layer_tokens = unevicted if sliding_window is None else min(unevicted, sliding_window - 1 + expired_slack)
            if layer not in self._budget_layers or tokens >= unevicted:
                blocks += heads * -(-layer_tokens // block_size)
            elif self._uniform:
                blocks += heads * -(-min(tokens, layer_tokens) // block_size)
            else:
                budget_heads += heads
        # worst case: the layers with the smallest blocks hold the tokens, and each row's last block has one token
        min_size, max_size = min(block_sizes), max(block_sizes)
        return blocks + budget_heads * (tokens * max_size + (max_size - 1) * min_size) // (min_size * max_size)
