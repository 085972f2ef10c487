"""How the next token of one answer is chosen: by the logits processors of transformers, and by chance or not."""

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
    """Chooses the tokens of one answer.

    Args:
        request: says how.
        number: of the answer among those to the request, which moves the seed.
    """

    def __init__(self, request: Request, number: int = 0) -> None:
        self._greedy, self._best = request.temperature == 0, request.logprobs
        self._processors = processors(request)
        self._draw = torch.Generator()
        if request.seed is None:
            self._draw.seed()
        else:
            self._draw.manual_seed(request.seed + number)

    def __call__(self, text: Tensor, logits: Tensor) -> Token:
        """Choose the token that follows a text; its own text is not known here.

        Args:
            text: ids ``[T]``, prompt and answer so far, on the CPU.
            logits: ``[V]`` float32, on the CPU.
        """
        scores: Tensor = self._processors(cast("Any", text[None]), cast("Any", logits[None]))[0]
        drawn = scores.argmax() if self._greedy else torch.multinomial(scores.softmax(-1), 1, generator=self._draw)
        chosen = int(drawn)
        if self._best is None:
            return Token(chosen)
        known = logits.log_softmax(-1)
        values, ids = known.topk(self._best)
        best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return Token(chosen, logprob=float(known[chosen]), best=best)


class _Temperature(LogitsProcessor):
    """Divides logits by a temperature, however low: the highest one becomes 0, so that it stays finite."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores, which are the same up to a constant."""
        apart = scores.double() - scores.double().amax(-1, keepdim=True)  # float32 has 0 for what is below 1e-45
        return cast("torch.FloatTensor", (apart / self.temperature).to(scores.dtype))


def processors(request: Request) -> LogitsProcessorList:
    """Return what changes the logits, in the order of ``model.generate``."""
    bias = [[[token], value] for token, value in request.logit_bias.items()]
    drawn = request.temperature > 0
    table: list[tuple[Any, Any, bool]] = [  # what changes logits, what it is told, and whether it changes anything
        (SequenceBiasLogitsProcessor, bias, bool(bias)),
        (RepetitionPenaltyLogitsProcessor, request.repetition_penalty, request.repetition_penalty != 1),
        (_Temperature, request.temperature, drawn and request.temperature != 1),
        (TopKLogitsWarper, request.top_k, drawn and request.top_k > 0),
        (TopPLogitsWarper, request.top_p, drawn and request.top_p < 1),
        (MinPLogitsWarper, request.min_p, drawn and request.min_p > 0),
    ]
    return LogitsProcessorList(make(told) for make, told, changes in table if changes)
