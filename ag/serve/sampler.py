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

ROWS = 512  # rows of logits that are in float32 at once


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

    def __call__(self, text: Tensor, logits: Tensor) -> Token:
        """Return the token after a text; its own text is empty.

        Args:
            text: ids ``[T]`` of the prompt and the answer so far, on the CPU.
            logits: ``[V]`` float32, on the CPU.
        """
        scores: Tensor = self._processors(cast("Any", text[None]), cast("Any", logits[None]))[0]
        drawn = scores.argmax() if self._greedy else torch.multinomial(scores.softmax(-1), 1, generator=self._draw)
        if self._best is None:
            return Token(int(drawn))
        return scored(logits[None], drawn.view(1), self._best)[0]


def scored(logits: Tensor, tokens: Tensor, best: int) -> list[Token]:
    """Return tokens with their log-probabilities.

    Args:
        logits: ``[T, V]``.
        tokens: ids ``[T]``, each after the logits of its row.
        best: number of the most probable tokens of each row.
    """
    found: list[Token] = []
    for rows, chosen in zip(logits.split(ROWS), tokens.to(logits.device).split(ROWS), strict=True):
        known = rows.float().log_softmax(-1)
        own, (values, ids) = known.gather(-1, chosen[:, None]), known.topk(best)
        columns = (chosen, own[:, 0], ids, values, (known > own).sum(-1) + 1)
        for token, logprob, others, theirs, rank in zip(*(column.tolist() for column in columns), strict=True):
            found.append(Token(token, logprob=logprob, best=tuple(zip(others, theirs, strict=True)), rank=rank))
    return found


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
