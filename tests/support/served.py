"""Requests to a scheduler, and what each would be answered alone."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import PreTrainedModel

import ag
from ag.serve import Request, Scheduler, Stream


def text(draw: random.Random, length: int) -> list[int]:
    """Token ids of the tiny models, none of which ends a text (5) or is padding (0)."""
    return [draw.randrange(6, 128) for _ in range(length)]


def alone(model: PreTrainedModel, policy: Any, request: Request) -> list[int]:
    """The answer of ``model.generate``, greedy; a grammar is followed by a new matcher for every token."""
    cache = ag.EvictionCache(model, policy)
    cache.protect(request.protect)
    ids = torch.tensor([request.tokens])  # a 0 among them is no padding
    told: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": request.max_tokens}
    if request.grammar is not None:
        first = len(request.tokens)
        told["logits_processor"] = [lambda text, logits: _allowed(_reader(request, text[0, first:]), logits)]
        told["stopping_criteria"] = [lambda text, _: torch.tensor([_reader(request, text[0, first:]).is_stopped()])]
    out = model.generate(ids, past_key_values=cache, do_sample=False, **told)  # type: ignore[operator]
    answer: list[int] = out[0, len(request.tokens) :].tolist()
    return answer


def _reader(request: Request, answer: torch.Tensor) -> Any:
    """A matcher that has read an answer."""
    matcher = request.grammar.deep_copy()
    assert matcher.consume_tokens(answer.tolist())
    return matcher


def _allowed(matcher: Any, logits: torch.Tensor) -> torch.Tensor:
    """Logits ``[1, V]`` of the tokens that a matcher allows next."""
    bits = matcher.compute_bitmask()
    allowed = torch.tensor([[bool(bits[token // 8] >> token % 8 & 1) for token in range(logits.shape[1])]])
    return logits.masked_fill(~allowed, -torch.inf)


def finish(scheduler: Scheduler, steps: int = 9000) -> None:
    """Step until nothing is left to do."""
    while scheduler.busy:
        scheduler.step()
        steps -= 1
        assert steps


def read(stream: Stream) -> list[int]:
    """The ids of an answer."""
    return [token.id for token in stream]
