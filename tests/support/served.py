"""Requests to a scheduler, and what each would be answered alone."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import ag
from ag.serve import Request, Scheduler, Stream


def text(draw: random.Random, length: int) -> list[int]:
    """Token ids of the tiny models, none of which ends a text (2) or is padding (0)."""
    return [draw.randrange(6, 128) for _ in range(length)]


def alone(model: PreTrainedModel, policy: Any, request: Request) -> list[int]:
    """The answer of ``model.generate``, greedy; a grammar is followed by a new matcher for every token."""
    cache = ag.EvictionCache(model, policy)
    cache.protect(request.protect)
    ids = torch.tensor([request.tokens])  # a 0 among them is no padding
    told: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": request.max_tokens}
    assert model.generation_config is not None
    own = [] if request.ignore_eos else [model.generation_config.eos_token_id]
    told |= {"eos_token_id": [*own, *request.stop_token_ids] or None, "repetition_penalty": request.repetition_penalty}
    told |= {"sequence_bias": [[[token], bias] for token, bias in request.logit_bias.items()] or None}
    told |= {"min_new_tokens": request.min_tokens or None, "logits_processor": [lowered(request)]}
    if request.grammar is not None:
        first = len(request.tokens)
        told["logits_processor"] += [lambda text, logits: _allowed(_reader(request, text[0, first:]), logits)]
        told["stopping_criteria"] = [lambda text, _: torch.tensor([_reader(request, text[0, first:]).is_stopped()])]
    out = model.generate(ids, past_key_values=cache, do_sample=False, **told)  # type: ignore[operator]
    answer: list[int] = out[0, len(request.tokens) :].tolist()
    return answer


def lowered(request: Request) -> Any:
    """What ``model.generate`` does to the logits under OpenAI's penalties, token by token."""

    def lower(ids: Tensor, logits: Tensor) -> Tensor:
        answer, logits = ids[0, len(request.tokens) :].tolist(), logits.clone()
        for token in set(answer):
            logits[0, token] -= request.presence_penalty + request.frequency_penalty * answer.count(token)
        return logits

    return lower


def options(draw: random.Random) -> dict[str, Any]:
    """Some options of a request at random, each of which may change its answer."""
    drawn = {
        "frequency_penalty": draw.uniform(-2, 2),
        "presence_penalty": draw.uniform(-2, 2),
        "repetition_penalty": draw.uniform(0.5, 2),
        "stop_token_ids": tuple(text(draw, 30)),
        "ignore_eos": True,
        "min_tokens": draw.randrange(1, 12),
        "logit_bias": {5: draw.uniform(0, 3)} | {token: draw.uniform(-3, 3) for token in text(draw, 3)},
        "prompt_logprobs": draw.randrange(3),
        "logprobs": draw.randrange(3),
        "reserved": draw.randrange(1, 9),
        "include_stop_str_in_output": True,
        "policy": draw.choice([ag.policy("full"), ag.policy("h2o", 12, "every"), ag.policy("snapkv", 0.5, window=2)]),
    }
    return {name: drawn[name] for name in draw.sample([*drawn], draw.randrange(5))}


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


def answers_of_shared_beginnings(
    model: PreTrainedModel, tokenizer: Any, policy: Any, pool: ag.Pool, shares: bool = True
) -> None:
    """Assert that answers to prompts that are read in parts, and share a beginning, are those of each alone.

    Beginnings are read once if the server ``shares`` them for this model.
    """
    draw, scheduler = random.Random(0), Scheduler(model, tokenizer, policy, pool, prefill_tokens=24)
    system = text(draw, 80)
    requests = [Request(tokens=system + text(draw, 5 + n), max_tokens=4 + n) for n in range(4)]
    streams = [stream for request in requests for stream in scheduler.submit(request)]
    finish(scheduler)
    assert [read(stream) for stream in streams] == [alone(model, policy, request) for request in requests]
    assert bool(scheduler.counts.cached) == shares
