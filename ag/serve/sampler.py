"""Sampling of the next token, with the logits processors of transformers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation import logits_process

from ag.engine.decode import COLDEST
from ag.serve.request import Request, Token

ROWS = 512  # rows of logits that are converted to float32 at once


class Sampler:
    """Samples the tokens of one of a request's completions; its ``index`` is added to the seed."""

    def __init__(self, request: Request, index: int = 0, end_tokens: Collection[int] = ()) -> None:
        self._greedy, self._num_logprobs = request.temperature < COLDEST, request.logprobs
        self._processors, self._generator = processors(request, end_tokens), torch.Generator()
        if request.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(request.seed + index)

    def __call__(self, token_ids: Tensor, logits: Tensor, allowed: Tensor | None = None) -> Token:
        """Sample the next token; its field ``text`` is empty.

        Args:
            token_ids: ids ``[T]`` of the prompt and the completion so far, on the CPU.
            logits: ``[V]`` float32, on the CPU.
            allowed: ``[V]`` bool, tokens that may be sampled. None: all tokens.

        Raises:
            FloatingPointError: the model gave NaN or infinity.
        """
        if not logits.max().isfinite():  # NaN is the maximum of any logits that have one
            raise FloatingPointError(
                "the model's logits have NaN or infinity: expected finite numbers; look at the weights and the dtype."
            )
        allowed_logits = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
        scores: Tensor = self._processors(cast("Any", token_ids[None]), cast("Any", allowed_logits[None]))[0]
        if self._greedy:
            sampled = scores.argmax()
        else:
            sampled = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)
        if self._num_logprobs is None:
            return Token(int(sampled))
        return with_logprobs(logits[None], sampled.view(1), self._num_logprobs)[0]


def with_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> list[Token]:
    """Return tokens with their log-probabilities.

    Args:
        logits: ``[T, V]``.
        tokens: ids ``[T]``; token i was sampled from row i.
        num_top: number of most probable tokens to add per row.
    """
    scored_tokens: list[Token] = []
    for rows, chosen in zip(logits.split(ROWS), tokens.to(logits.device).split(ROWS), strict=True):
        logprobs = rows.float().log_softmax(-1)
        own, top = logprobs.gather(-1, chosen[:, None]), logprobs.topk(num_top)
        ranks = (logprobs > own).sum(-1) + 1
        columns = (chosen, own[:, 0], top.indices, top.values, ranks)
        for token, logprob, ids, values, rank in zip(*(column.tolist() for column in columns), strict=True):
            best = tuple(zip(ids, values, strict=True))
            scored_tokens.append(Token(token, logprob=logprob, top_logprobs=best, rank=rank))
    return scored_tokens


class _Occurrences(logits_process.LogitsProcessor):
    """Lowers the logits of tokens that occur in the completion, after ``num_prompt`` tokens (penalties of OpenAI)."""

    def __init__(self, num_prompt: int, frequency: float, presence: float) -> None:
        self.num_prompt, self.frequency, self.presence = num_prompt, frequency, presence

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the lowered scores."""
        counts = input_ids[0, self.num_prompt :].bincount(minlength=scores.shape[-1])
        return cast("torch.FloatTensor", scores - self.frequency * counts - self.presence * (counts > 0))


def processors(request: Request, end_tokens: Collection[int] = ()) -> logits_process.LogitsProcessorList:
    """Return the logits processors of a request, in the order of ``model.generate``."""
    num_prompt, samples = len(request.tokens), request.temperature >= COLDEST
    penalty, penalties = request.repetition_penalty, (request.frequency_penalty, request.presence_penalty)
    bias = [[[token], value] for token, value in request.logit_bias.items()]
    least = num_prompt, request.min_tokens, [*end_tokens]
    table: list[tuple[bool, Any, tuple[Any, ...]]] = [  # whether it changes logits, its class and arguments
        (bool(bias), logits_process.SequenceBiasLogitsProcessor, (bias,)),
        (penalty != 1, logits_process.RepetitionPenaltyLogitsProcessor, (penalty,)),
        (any(penalties), _Occurrences, (num_prompt, *penalties)),
        (bool(request.min_tokens and end_tokens), logits_process.MinNewTokensLengthLogitsProcessor, least),
        (samples and request.temperature != 1, logits_process.TemperatureLogitsWarper, (request.temperature,)),
        (samples and request.top_k > 0, logits_process.TopKLogitsWarper, (request.top_k,)),
        (samples and request.top_p < 1, logits_process.TopPLogitsWarper, (request.top_p,)),
        (samples and request.min_p > 0, logits_process.MinPLogitsWarper, (request.min_p,)),
    ]
    chosen = (processor(*arguments) for changes, processor, arguments in table if changes)
    return logits_process.LogitsProcessorList(chosen)
