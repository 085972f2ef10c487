"""How the next token of one answer is chosen: by the logits processors of transformers, and by chance or not."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StopStringCriteria,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ag.serve.request import Reason, Request, Token


class Sampler:
    """Chooses the tokens of one answer.

    Args:
        request: says how.
        tokenizer: knows what text tokens are, for ``stop``.
        ends: ids of tokens that end a text.
        number: of the answer among those to the request, which moves the seed.
    """

    def __init__(self, request: Request, tokenizer: Any, ends: Collection[int], number: int = 0) -> None:
        self.request, self.ends = request, ends
        self._processors = _processors(request)
        self._stop = StopStringCriteria(tokenizer, list(request.stop)) if request.stop else None
        self._draw = torch.Generator()
        if request.seed is None:
            self._draw.seed()
        else:
            self._draw.manual_seed(request.seed + number)

    def __call__(self, text: Tensor, logits: Tensor) -> Token:
        """Choose the token that follows a text.

        Args:
            text: ids ``[T]``, prompt and answer so far, on the CPU.
            logits: ``[V]`` float32, on the CPU.
        """
        scores: Tensor = self._processors(cast("Any", text[None]), cast("Any", logits[None]))[0]
        if self.request.temperature:
            chosen = int(torch.multinomial(scores.softmax(-1), 1, generator=self._draw))
        else:
            chosen = int(scores.argmax())
        if self.request.logprobs is None:
            return Token(chosen)
        known = logits.log_softmax(-1)
        values, ids = known.topk(self.request.logprobs)
        return Token(chosen, float(known[chosen]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))

    def ended(self, text: Tensor, count: int) -> Reason | None:
        """Return why a text ``[T]`` whose last ``count`` tokens are the answer ends; None: it goes on."""
        if int(text[-1]) in self.ends or (self._stop is not None and bool(self._stop(text[None], None))):
            return "stop"
        return "length" if count >= self.request.max_tokens else None


class _Temperature(LogitsProcessor):
    """Divides logits by a temperature, however low: the highest one becomes 0, so that it stays finite."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores, which are the same up to a constant."""
        apart = scores.double() - scores.double().amax(-1, keepdim=True)  # float32 has 0 for what is below 1e-45
        return cast("torch.FloatTensor", (apart / self.temperature).to(scores.dtype))


def _processors(request: Request) -> LogitsProcessorList:
    """Return what changes the logits, in the order of ``model.generate``."""
    found = LogitsProcessorList()
    if request.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in request.logit_bias.items()]))
    if request.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(request.repetition_penalty))
    if not request.temperature:
        return found
    if request.temperature != 1:
        found.append(_Temperature(request.temperature))
    if request.top_k:
        found.append(TopKLogitsWarper(request.top_k))
    if request.top_p < 1:
        found.append(TopPLogitsWarper(request.top_p))
    if request.min_p:
        found.append(MinPLogitsWarper(request.min_p))
    return found
