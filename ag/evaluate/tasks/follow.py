"""Tokens after a prompt: the likelihood of given ones, and greedy decoding."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ag.engine import EvictionCache
from ag.model.hooks import decoder_of, lm_logits


@torch.no_grad()
def score(
    model: nn.Module, cache: EvictionCache, last: Tensor, answers: list[list[int]]
) -> list[tuple[Tensor, Tensor]]:
    """Return for each answer its tokens' log-likelihoods ``[T]`` in nats, float32, and whether each is the likeliest.

    The answers share one prompt and are fed as one batch padded on the right; if the policy evicts while decoding, in
    pieces as long as its interval. The results are on the CPU.

    Args:
        model: the model.
        cache: holds one prompt; it is used up.
        last: ``[1, d]``, the final hidden state of the prompt's last token.
        answers: tokens of each.
    """
    longest = max(map(len, answers))
    tokens = torch.tensor([answer + [0] * (longest - len(answer)) for answer in answers], device=last.device)
    mask = torch.tensor([[i < len(answer) for i in range(longest)] for answer in answers], device=last.device)
    if len(answers) > 1:
        cache.batch_repeat_interleave(len(answers))
    states = last.expand(len(answers), -1)[:, None]
    if longest > 1:
        states = torch.cat([states, feed(model, cache, tokens[:, :-1], mask[:, :-1])], 1)
    found = []
    for row, ids, answer in zip(states, tokens, answers, strict=True):
        logits, right = lm_logits(model, row[: len(answer)]).float(), ids[: len(answer)]
        nats = -F.cross_entropy(logits, right, reduction="none")
        found.append((nats.cpu(), (logits.argmax(-1) == right).cpu()))
    return found


@torch.no_grad()
def log_probabilities(model: nn.Module, cache: EvictionCache, last: Tensor, tokens: list[int]) -> Tensor:
    """Return the log-probabilities ``[T, V]``, float32, at each of T tokens that follow a prompt.

    Args:
        model: the model.
        cache: holds one prompt; it is used up.
        last: ``[1, d]``, the final hidden state of the prompt's last token.
        tokens: the T tokens.
    """
    states = last
    if len(tokens) > 1:
        states = torch.cat([last, feed(model, cache, torch.tensor([tokens[:-1]], device=last.device))[0]])
    return lm_logits(model, states).float().log_softmax(-1)


def distance(full: Tensor, other: Tensor) -> dict[str, float]:
    """Return the tags ``kl`` and ``same_top1`` of log-probabilities ``[T, V]`` beside those of a full cache.

    They are the mean ``KL(full || other)`` in nats, and the share of the tokens at which both have the same likeliest
    one.
    """
    kl = (full.exp() * (full - other)).sum(-1)
    same = (full.argmax(-1) == other.argmax(-1)).float()
    return {"kl": float(kl.mean()), "same_top1": float(same.mean())}


@torch.no_grad()
def feed(model: nn.Module, cache: EvictionCache, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Feed tokens to a cache and return their final hidden states ``[B, T, d]``.

    Args:
        model: the model.
        cache: has seen B sequences without padding on their left.
        tokens: ``[B, T]``.
        mask: ``[B, T]`` bool, False on padding, which is on the right.
    """
    decoder, states = decoder_of(model), []
    for start in range(0, tokens.shape[1], piece := cache.policy.steps or tokens.shape[1]):
        part = slice(start, start + piece)
        valid = None if mask is None else torch.cat([cache.valid, mask[:, part]], 1)
        states.append(decoder(tokens[:, part], attention_mask=valid, past_key_values=cache).last_hidden_state)
    return torch.cat(states, 1)


def greedy(
    model: nn.Module, cache: EvictionCache, last: Tensor, most: int, stop: Collection[int], least: int = 0
) -> list[int]:
    """Continue one prompt by the likeliest tokens; see :func:`greedy_batch`."""
    [written] = greedy_batch(model, cache, last, [most], stop, least)
    return written.tokens


class Written(NamedTuple):
    """A finished text of a batch."""

    row: int  # index of the sequence in the batch as it was given
    place: int  # index of its sequence in the cache, until the next text is yielded
    tokens: list[int]  # without the end token


@torch.no_grad()
def greedy_batch(
    model: nn.Module, cache: EvictionCache, last: Tensor, most: Sequence[int], stop: Collection[int], least: int = 0
) -> Iterator[Written]:
    """Continue prompts by the likeliest tokens, and yield each text when it ends; its sequence then leaves the cache.

    Args:
        model: the model.
        cache: holds B prompts; it is used up.
        last: ``[B, d]``, the final hidden state of the last token of each.
        most: largest number of tokens of each text.
        stop: tokens that end a text and are not part of it.
        least: smallest number of tokens of a text.
    """
    texts: list[list[int]] = [[] for _ in most]
    rows = list(range(len(most)))  # of the unfinished texts
    while rows:
        logits, going = lm_logits(model, last), []
        if len(texts[rows[0]]) < least:
            logits[:, list(stop)] = -torch.inf
        for place, token in enumerate(logits.argmax(-1).tolist()):
            text = texts[rows[place]]
            if token not in stop:
                text.append(token)
            if token in stop or len(text) == most[rows[place]]:
                yield Written(rows[place], place, text)
            else:
                going.append(place)
        if going and len(going) < len(rows):
            cache.batch_select_indices(torch.tensor(going, device=last.device))
        rows = [rows[place] for place in going]
        if rows:
            tokens = torch.tensor([[texts[row][-1]] for row in rows], device=last.device)
            last = feed(model, cache, tokens)[:, -1]


def end_tokens(model: nn.Module, eos: int | None) -> set[int]:
    """Return the tokens that end a text: ``eos`` of the tokenizer, and those of the model's generation settings."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return {token for token in (eos, *(named if isinstance(named, list) else [named])) if token is not None}
