"""Sampling of the next token, with the logits processors of transformers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
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
        ends: tokens that end the answer.
    """

    def __init__(self, request: Request, number: int = 0, ends: Collection[int] = ()) -> None:
        self._greedy, self._best = request.temperature == 0, request.logprobs
        self._processors = processors(request, ends)
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


class _Occurrences(LogitsProcessor):
    """Lowers the logits of the tokens that an answer has (OpenAI's API).

    Args:
        prompt: tokens of the prompt, which do not count.
        frequency: is subtracted for each time that the answer has the token.
        presence: is subtracted once.
    """

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self.prompt, self.frequency, self.presence = prompt, frequency, presence

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the lowered scores."""
        counts = input_ids[0, self.prompt :].bincount(minlength=scores.shape[-1])
        return cast("torch.FloatTensor", scores - self.frequency * counts - self.presence * (counts > 0))


def processors(request: Request, ends: Collection[int] = ()) -> LogitsProcessorList:
    """Return the logits processors of a request, in the order of ``model.generate``."""
    prompt, least = len(request.tokens), request.min_tokens
    penalties = request.frequency_penalty, request.presence_penalty
    bias = [[[token], value] for token, value in request.logit_bias.items()]
    drawn = request.temperature > 0
    table: list[tuple[Any, Any, bool]] = [  # class, argument or arguments, whether it changes logits
        (SequenceBiasLogitsProcessor, bias, bool(bias)),
        (RepetitionPenaltyLogitsProcessor, request.repetition_penalty, request.repetition_penalty != 1),
        (_Occurrences, (prompt, *penalties), any(penalties)),
        (MinNewTokensLengthLogitsProcessor, (prompt, least, [*ends]), bool(least and ends)),
        (_Temperature, request.temperature, drawn and request.temperature != 1),
        (TopKLogitsWarper, request.top_k, drawn and request.top_k > 0),
        (TopPLogitsWarper, request.top_p, drawn and request.top_p < 1),
        (MinPLogitsWarper, request.min_p, drawn and request.min_p > 0),
    ]
    return LogitsProcessorList(
        kind(*(given if isinstance(given, tuple) else (given,))) for kind, given, changes in table if changes
    )
