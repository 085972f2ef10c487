"""How many blocks of a pool a request may take, worked out before its prompt is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig

from ag.engine.allocators.uniform import Uniform
from ag.engine.block_pool import BLOCK
from ag.engine.cache import EvictionCache
from ag.engine.layer import EXPIRED
from ag.model.geometry import attention_layers
from ag.serve.request import Request

MARGIN = 1.25  # over the share that flags have kept so far, for prompts to come


@dataclass(frozen=True)
class Need:
    """Blocks that one answer takes at most.

    Attributes:
        reading: while its prompt is read.
        writing: behind the prompt.
    """

    reading: int
    writing: int


class Admission:
    """Says what requests may take.

    Under a budget and under ``full`` no answer takes more. What flags keep is known when it happens: as large a share
    as of the prompts so far, with a margin, and all of the answer.

    Args:
        cache: of the model and the policy.
        config: of the model.
        part: most tokens of a prompt that are read at once.
    """

    def __init__(self, cache: EvictionCache, config: PretrainedConfig, part: int) -> None:
        text = config.get_text_config()
        self.policy, self.part = cache.policy, part
        self._heads: int = text.num_key_value_heads
        self._windows = _windows(text, cache.num_layers)
        self._sharing = set(cache.sharing)
        self._flags = self.policy.by_gates and self.policy.budget is None
        self._even = isinstance(self.policy.allocator, Uniform) and not self._flags
        self._kept = self._told = 0.0  # tokens per KV head that flags kept of prompts, and tokens of those prompts

    def learn(self, cache: EvictionCache, tokens: int) -> None:
        """Take note of how much flags have kept of a prompt of this number of tokens."""
        if self._flags:
            self._kept += float(cache.store.held.double().mean())
            self._told += tokens

    def need(self, request: Request) -> Need:
        """Return what one answer to a request takes, its prompt included.

        The last token of an answer is not read, and so takes no room.
        """
        policy, prompt, read = self.policy, len(request.tokens), request.max_tokens - 1
        again, marks = self._reread(request), request.marks()
        # the most tokens per KV head, the mean over heads, while the prompt is read in parts and behind it
        reading, writing = prompt, prompt + read
        if self._flags and self._told:
            writing = min(prompt, int(MARGIN * prompt * self._kept / self._told) + int(marks.sum())) + read
        elif policy.budget is not None:
            if policy.block is not None:
                reading = min(prompt, self._stays(marks, prompt) + policy.block)
            if policy.steps is None:
                writing = min(prompt, self._stays(marks, prompt)) + read
            else:  # under ``every`` a token takes the place of another one a step later, and room is made unseen
                writing = min(writing, self._stays(marks, writing) + min(read, max(policy.steps, 2)))
        return Need(
            reading=self._blocks(reading + again, prompt + again, EXPIRED + self.part),
            writing=self._blocks(writing, prompt + read, min(read, EXPIRED)),
        )

    def _stays(self, marks: Tensor, seen: int) -> int:
        """Return what a decision leaves of a text: the budget, or more where the request or the scorer protects more.

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
        """Return the most tokens that are held beside a prompt while it is reread."""
        rereader = None if self.policy.scorer is None else self.policy.scorer.rereader
        inputs = [] if rereader is None else rereader.inputs([*request.tokens])
        return max((len(asked) for _, asked in inputs), default=0)

    def _blocks(self, tokens: int, whole: int, lag: int) -> int:
        """Return the blocks of all layers.

        Args:
            tokens: per KV head in layers that share the budget, the mean over heads.
            whole: in the others, without a sliding window.
            lag: tokens that a layer with a sliding window may hold beyond what the next query sees.
        """
        blocks = shared = 0
        for layer, window in enumerate(self._windows):
            seen = whole if window is None else min(whole, window - 1 + lag)
            if layer not in self._sharing or tokens >= whole:
                blocks += self._heads * -(-seen // BLOCK)
            elif self._even:
                blocks += self._heads * -(-min(tokens, seen) // BLOCK)
            else:
                shared += self._heads
        # of rows that are not equally long each may have a block with one token
        return blocks + (shared * (tokens + BLOCK - 1)) // BLOCK


def _windows(text: PretrainedConfig, layers: int) -> list[int | None]:
    """Return the sliding window of each layer."""
    window: int | None = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kinds[index] == "sliding_attention" else None for index in attention_layers(text)]
