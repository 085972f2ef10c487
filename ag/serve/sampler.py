"""Sampling of the next token, with the logits processors of transformers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ag.serve.request import Request, Token


class Sampler:
    """Samples the tokens of one answer.

    Args:
        request: the parameters of sampling.
        number: index of the answer among the answers to the request; it is added to the seed.
    """

    def __init__(self, request: Request, number: int = 0) -> None:
        self._greedy, self._best = request.temperature == 0, request.logprobs
        self._processors = processors(request)
        self._draw = torch.Generator()
        if request.seed is None:
            self._draw.seed()
        else:
            self._draw.manual_seed(request.seed + number)

    def __call__(self, text: Tensor, logits: Tensor, allowed: Tensor | None = None) -> Token:
        """Return the token after a text; its own text is empty.

        Args:
            text: ids ``[T]`` of the prompt and the answer so far, on the CPU.
            logits: ``[V]`` float32, on the CPU.
            allowed: the tokens that may be returned, ``[V]`` bool; None means all.
        """
        open_to = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
        scores: Tensor = self._processors(cast("Any", text[None]), cast("Any", open_to[None]))[0]
        drawn = scores.argmax() if self._greedy else torch.multinomial(scores.softmax(-1), 1, generator=self._draw)
        chosen = int(drawn)
        if self._best is None:
            return Token(chosen)
        known = logits.log_softmax(-1)
        values, ids = known.topk(self._best)
        best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return Token(chosen, logprob=float(known[chosen]), best=best)


class _Temperature(LogitsProcessor):
    """Divides logits by a temperature, after the largest one became 0, so that it stays finite."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scaled scores, up to a constant."""
        apart = scores.double() - scores.double().amax(-1, keepdim=True)  # in float32 1e-46 is 0
        return cast("torch.FloatTensor", (apart / self.temperature).to(scores.dtype))


def processors(request: Request) -> LogitsProcessorList:
    """Return the logits processors of a request, in the order of ``model.generate``."""
    bias = [[[token], value] for token, value in request.logit_bias.items()]
    drawn = request.temperature > 0
    table: list[tuple[Any, Any, bool]] = [  # class, argument, whether it changes logits
        (SequenceBiasLogitsProcessor, bias, bool(bias)),
        (RepetitionPenaltyLogitsProcessor, request.repetition_penalty, request.repetition_penalty != 1),
        (_Temperature, request.temperature, drawn and request.temperature != 1),
        (TopKLogitsWarper, request.top_k, drawn and request.top_k > 0),
        (TopPLogitsWarper, request.top_p, drawn and request.top_p < 1),
        (MinPLogitsWarper, request.min_p, drawn and request.min_p > 0),
    ]
    return LogitsProcessorList(kind(argument) for kind, argument, changes in table if changes)
