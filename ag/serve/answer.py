"""What a scheduler works on: answers, and the prompts that they begin with."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from ag.engine.cache import EvictionCache
from ag.serve.admission import Need
from ag.serve.prefix_cache import key_of
from ag.serve.request import Request, Stream
from ag.serve.sampler import Sampler


@dataclass(eq=False)
class Answer:
    """An answer that waits, whose prompt is being read, or that is being written.

    Attributes:
        number: of the answer, counted from the first one that was asked for.
        request: what is asked.
        stream: where its tokens go.
        sampler: chooses them.
        text: ids ``[T]`` on the CPU, of the prompt and of the answer so far.
        since: when it was asked for, in seconds of the scheduler's clock.
        need: blocks that it may take.
        read: tokens of the text that the model has read, while the answer is in the batch.
    """

    number: int
    request: Request
    stream: Stream
    sampler: Sampler
    text: Tensor
    since: float
    need: Need
    read: int = 0

    @property
    def prompt(self) -> Tensor:
        """The ids of the prompt."""
        return self.text[: len(self.request.tokens)]

    @property
    def written(self) -> int:
        """Tokens of the answer so far."""
        return len(self.text) - len(self.request.tokens)

    def key(self) -> Tensor:
        """Return the text so far with what is protected, as a :class:`PrefixCache` compares texts."""
        return key_of(self.text, self.request.marks())

    def coming(self, drafts: int) -> Tensor:
        """Return the ids that the model reads next: one of the text, and up to ``drafts`` more of it or looked up."""
        known = self.text[self.read :][: 1 + drafts]
        more = min(1 + drafts - len(known), self.request.max_tokens - self.written - 1)
        if more <= 0 or self.read + len(known) < len(self.text):
            return known
        found, _ = PromptLookupCandidateGenerator(num_output_tokens=more, max_length=sys.maxsize).get_candidates(
            cast("Any", self.text[None])
        )
        return torch.cat([known, found[0, len(self.text) :]])


@dataclass(eq=False)
class Prompt:
    """A prompt that is being read, part by part.

    Attributes:
        answers: that begin with it.
        cache: what is held of it.
        read: tokens read so far.
        shared: of these, tokens of a cached prefix.
        mark: where the prefix ends that it has in common with other texts; 0 means that none does behind ``shared``.
    """

    answers: list[Answer]
    cache: EvictionCache
    read: int = 0
    shared: int = 0
    mark: int = 0
