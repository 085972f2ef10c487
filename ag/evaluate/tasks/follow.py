"""Tokens after a prompt: the likelihood of given tokens, and decoding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ag.engine import EvictionCache
from ag.engine.shared_step import step_together
from ag.model.structure import decoder_of, lm_logits


@torch.no_grad()
def score(
    model: nn.Module, cache: EvictionCache, last_hidden: Tensor, answers: list[list[int]]
) -> list[tuple[Tensor, Tensor]]:
    """Return for each answer its tokens' log-likelihoods ``[T]`` in nats, float32, and whether each is the likeliest.

    The answers share one prompt and are fed as one batch, padded on the right. If the policy evicts while decoding,
    each pass is one of its intervals. The results are on the CPU. The cache, with one prompt, is changed.
    """
    lengths = [len(answer) for answer in answers]
    states = last_hidden.expand(len(answers), -1)[:, None]
    if max(lengths) > 1:
        states = torch.cat([states, feed_texts(model, cache, [answer[:-1] for answer in answers])], 1)
    # without padding, in one product: the vocabulary's weights are read once for all answers
    logits = lm_logits(model, torch.cat([row[:length] for row, length in zip(states, lengths, strict=True)])).float()
    target_tokens = torch.tensor([token for answer in answers for token in answer], device=logits.device)
    log_likelihoods = -F.cross_entropy(logits, target_tokens, reduction="none").cpu()
    likeliest = (logits.argmax(-1) == target_tokens).cpu()
    return list(zip(log_likelihoods.split(lengths), likeliest.split(lengths), strict=True))


def mean_nats(model: nn.Module, cache: EvictionCache, last_hidden: Tensor, answer: list[int]) -> float:
    """Return the mean negative log-likelihood of an answer's tokens; see :func:`score`."""
    [(log_likelihoods, _)] = score(model, cache, last_hidden, [answer])
    return -float(log_likelihoods.mean())


@torch.no_grad()
def log_probabilities(model: nn.Module, cache: EvictionCache, last_hidden: Tensor, tokens: list[int]) -> Tensor:
    """Return the log-probabilities ``[T, V]``, float32, at each of T tokens that follow a prompt; see :func:`score`."""
    states = last_hidden
    if len(tokens) > 1:
        states = torch.cat([last_hidden, feed(model, cache, torch.tensor([tokens[:-1]], device=last_hidden.device))[0]])
    return lm_logits(model, states).float().log_softmax(-1)


def distance(full: Tensor, other: Tensor) -> dict[str, float]:
    """Return the tags ``kl`` and ``same_top1`` of log-probabilities ``[T, V]`` against a full cache's.

    They are the mean ``KL(full || other)`` in nats, and the share of tokens where both agree on the likeliest token.
    """
    kl = (full.exp() * (full - other)).sum(-1)
    same = (full.argmax(-1) == other.argmax(-1)).float()
    return {"kl": float(kl.mean()), "same_top1": float(same.mean())}


@torch.no_grad()
def feed(model: nn.Module, cache: EvictionCache, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Feed tokens ``[B, T]`` to a cache and return their final hidden states ``[B, T, d]``.

    ``mask`` ``[B, T]`` is False on padding, which is on the right. None: no padding.
    """
    decoder, states = decoder_of(model), []
    for start in range(0, tokens.shape[1], tokens_per_pass := cache.policy.steps or tokens.shape[1]):
        columns = slice(start, start + tokens_per_pass)
        valid = None if mask is None else torch.cat([cache.valid, mask[:, columns]], 1)
        states.append(decoder(tokens[:, columns], attention_mask=valid, past_key_values=cache).last_hidden_state)
    return torch.cat(states, 1)


def feed_texts(model: nn.Module, cache: EvictionCache, texts: Sequence[list[int]]) -> Tensor:
    """Feed N texts, each to a copy of a cache with one prompt; returns their final hidden states ``[N, T, d]``.

    Texts are padded on the right to the longest, of T tokens. The cache is changed.
    """
    if len(texts) > 1:
        cache.batch_repeat_interleave(len(texts))
    return feed(model, cache, *padded(texts, cache.valid.device, "right"))


def greedy(
    model: nn.Module,
    prompts: Sequence[tuple[EvictionCache, Tensor]],
    max_new_tokens: int,
    stop: Collection[int],
    min_new_tokens: int = 0,
) -> list[list[int]]:
    """Continue prompts by the likeliest tokens, and return the tokens after each.

    ``prompts`` are caches with one prompt each, perhaps of different policies, and the final hidden state ``[1, d]`` of
    its last token. The caches are changed. For the other arguments see :func:`continue_batch`.
    """
    caches, hidden = [cache for cache, _ in prompts], torch.cat([last_hidden for _, last_hidden in prompts])
    limits = [max_new_tokens] * len(prompts)
    texts = continue_batch(model, caches, hidden, limits, stop, min_new_tokens)
    written = {text.text_index: text.tokens for text in texts}
    return [written[index] for index in range(len(prompts))]


def likeliest(logits: Tensor, text_indices: Sequence[int]) -> list[int]:
    """Return the likeliest token of each text; see :func:`continue_batch`."""
    tokens: list[int] = logits.max(-1).indices.tolist()  # three times as fast as argmax in bfloat16 on a CPU
    return tokens


class WrittenText(NamedTuple):
    """A finished text of a batch."""

    text_index: int  # index of the text in the original batch
    sequence: int  # its current index among the sequences or caches, valid until the next text is yielded
    tokens: list[int]  # without the end token


@torch.no_grad()
def continue_batch(
    model: nn.Module,
    cache: EvictionCache | list[EvictionCache],
    last_hidden: Tensor,
    max_new_tokens: Sequence[int],
    stop: Collection[int],
    min_new_tokens: int = 0,
    choose: Callable[[Tensor, Sequence[int]], list[int]] = likeliest,
) -> Iterator[WrittenText]:
    """Continue prompts token by token, and yield each text when it ends. Its sequence then leaves the cache.

    Args:
        model: the model.
        cache: a cache with B prompts, or B caches with one prompt each; this function changes them.
        last_hidden: ``[B, d]``, the final hidden state of each prompt's last token.
        max_new_tokens: most tokens of each text.
        stop: tokens that end a text and are not part of it.
        min_new_tokens: fewest tokens of a text.
        choose: returns the next token of each unfinished text, from logits ``[N, V]`` and the indices of the N texts.
    """
    texts: list[list[int]] = [[] for _ in max_new_tokens]
    unfinished = list(range(len(max_new_tokens)))  # indices of texts
    while unfinished:
        logits, kept_sequences = lm_logits(model, last_hidden), []
        if len(texts[unfinished[0]]) < min_new_tokens:
            logits[:, list(stop)] = -torch.inf
        for sequence, token in enumerate(choose(logits, unfinished)):
            text = texts[unfinished[sequence]]
            if token not in stop:
                text.append(token)
            if token in stop or len(text) == max_new_tokens[unfinished[sequence]]:
                yield WrittenText(unfinished[sequence], sequence, text)
            else:
                kept_sequences.append(sequence)
        if isinstance(cache, list):
            cache = [cache[sequence] for sequence in kept_sequences]
        elif kept_sequences and len(kept_sequences) < len(unfinished):
            cache.batch_select_indices(torch.tensor(kept_sequences, device=last_hidden.device))
        unfinished = [unfinished[sequence] for sequence in kept_sequences]
        if unfinished:
            tokens = [texts[text_index][-1] for text_index in unfinished]
            if isinstance(cache, list):
                last_hidden = step_together(model, cache, tokens)
            else:
                last_hidden = feed(model, cache, torch.tensor(tokens, device=last_hidden.device)[:, None])[:, -1]


def padded(texts: Sequence[list[int]], device: torch.device, side: str = "left") -> tuple[Tensor, Tensor]:
    """Return texts of several lengths as one batch ``[B, T]``, padded on a side, and the mask of their tokens."""
    rows = [torch.tensor(text, dtype=torch.long) for text in texts]
    masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    ids, mask = (pad_sequence(each, batch_first=True, padding_side=side).to(device) for each in (rows, masks))
    return ids, mask
