"""Upper bounds of the blocks that a request takes, computed before its prompt is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig

from ag.engine.allocators.uniform import Uniform
from ag.engine.cache import EvictionCache
from ag.engine.layer import EXPIRED
from ag.model.geometry import sliding_windows
from ag.serve.request import Request

MARGIN = 1.25  # factor on the share that flags have kept of earlier prompts


@dataclass(frozen=True)
class Need:
    """The most blocks of one answer."""

    reading: int  # while its prompt is read
    writing: int  # afterwards


class Admission:
    """Bounds the blocks of requests.

    The bound is exact or too large under a budget and under ``full``. Under flags it is an estimate: the share kept of
    earlier prompts times :data:`MARGIN`, and the whole answer.

    Args:
        cache: an eviction cache of the model and the policy.
        config: of the model.
        part: most tokens of a prompt that are read at once.
    """

    def __init__(self, cache: EvictionCache, config: PretrainedConfig, part: int) -> None:
        self.policy, self.part = cache.policy, part
        self._rows = [(store.kv_heads, store.block) for store in cache.store_of]  # of each layer; tokens of a block
        self._windows = sliding_windows(config)
        self._sharing = set(cache.sharing)
        self._flags = self.policy.by_gates and self.policy.budget is None
        self._even = isinstance(self.policy.allocator, Uniform) and not self._flags
        self._kept = self._read = 0.0  # tokens per KV head that flags kept of prompts, and tokens of those prompts

    def learn(self, cache: EvictionCache, tokens: int) -> None:
        """Record what flags have kept of a prompt of this number of tokens."""
        if self._flags:
            rows = len(cache.sequences) * sum(store.kv_heads for store in cache.store_of)
            self._kept += sum(float(store.held.sum()) for store in cache.stores) / rows
            self._read += tokens

    def need(self, request: Request) -> Need:
        """Return the bound of one answer, its prompt included; its last token is never read and takes no block."""
        policy, prompt, read = self.policy, len(request.tokens), max(request.expected - 1, 0)
        again, marks = self._reread(request), request.marks()
        # the most tokens per KV head, as a mean over heads, while the prompt is read in chunks and afterwards
        reading, writing = prompt, prompt + read
        if self._flags and self._read:
            writing = min(prompt, int(MARGIN * prompt * self._kept / self._read) + int(marks.sum())) + read
        elif policy.budget is not None:
            if policy.block is not None:
                reading = min(prompt, self._capacity(marks, prompt) + policy.block)
            if policy.steps is None:
                writing = min(prompt, self._capacity(marks, prompt)) + read
            else:  # ``every`` evicts one step late
                writing = min(writing, self._capacity(marks, writing) + min(read, max(policy.steps, 2)))
        return Need(
            reading=self._blocks(reading + again, prompt + again, EXPIRED + self.part),
            writing=self._blocks(writing, prompt + read, min(read, EXPIRED)),
        )

    def _capacity(self, marks: Tensor, seen: int) -> int:
        """Return the tokens per KV head after an eviction: the budget, or the protected tokens if those are more.

        Args:
            marks: ``[T]`` bool, the tokens of the prompt that the request protects.
            seen: tokens of the text.
        """
        assert self.policy.scorer is not None
        budget = self.policy.capacity(torch.tensor([len(marks)]))
        sinks, recent = (int(x) for x in self.policy.scorer.limits(budget))
        ranks = torch.arange(seen)
        protected = (ranks < sinks) | (ranks >= seen - recent) | F.pad(marks, (0, seen - len(marks)))
        return max(int(budget), int(protected.sum()))

    def _reread(self, request: Request) -> int:
        """Return the most tokens that the cache holds beside a prompt while a scorer rereads it."""
        rereader = None if self.policy.scorer is None else self.policy.scorer.rereader
        inputs = [] if rereader is None else rereader.inputs([*request.tokens])
        return max((len(asked) for _, asked in inputs), default=0)

    def _blocks(self, tokens: int, whole: int, lag: int) -> int:
        """Return the blocks of all layers.

        Args:
            tokens: mean tokens per KV head in layers under the budget.
            whole: tokens per KV head in the other layers without a sliding window.
            lag: tokens that a layer with a sliding window may hold beyond its window.
        """
        blocks, shared, sizes = 0, 0, [size for _, size in self._rows]
        for layer, (window, (heads, size)) in enumerate(zip(self._windows, self._rows, strict=True)):
            seen = whole if window is None else min(whole, window - 1 + lag)
            if layer not in self._sharing or tokens >= whole:
                blocks += heads * -(-seen // size)
            elif self._even:
                blocks += heads * -(-min(tokens, seen) // size)
            else:
                shared += heads
        # tokens may lie where blocks have the fewest, and each of the unequal rows may have a last block with one token
        least, most = min(sizes), max(sizes)
        return blocks + shared * (tokens * most + (most - 1) * least) // (least * most)
