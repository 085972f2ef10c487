"""Perplexity of plain documents: after an evicted prompt, and of complete books while tokens are evicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.data.tokens import tokenize_prompt
from ag.engine import EvictionCache, Policy, policy, read_prompt
from ag.errors import UserError
from ag.evaluate.tasks.base import (
    LeftOut,
    Outcome,
    Outcomes,
    PositiveInt,
    PromptTask,
    Sample,
    Samples,
    Tags,
    Task,
    synchronised_time,
)
from ag.evaluate.tasks.follow import distance, feed, mean_nats
from ag.evaluate.tasks.held_out import held_out, held_out_texts
from ag.gates.attach import attached_gates
from ag.gates.gate import AttentionGates
from ag.model.structure import lm_logits

COMPARED = 64  # one token of this number in a book is compared with a full cache
LETTERS = 32  # characters tokenised per token, more than texts have on average


@dataclass(frozen=True)
class Documents(Task):
    """A task on documents."""

    data: str | None = None  # hub id, or folder under root; None: PG-19 on the hub, :attr:`folder` in a root
    subset: str | None = None  # configuration name on the hub
    split: str | None = None  # None: test, or validation if there is no test split
    text_field: str = "text"  # the field that holds a document

    metric: ClassVar[str] = "nats per token"
    higher_is_better: ClassVar[bool] = False
    unit: ClassVar[str] = "documents"
    folder: ClassVar[str] = "corpus"

    def documents(self, tokenizer: Tokenizer, num_prompt: int, max_tokens: int | None) -> Iterator[Sample]:
        """Yield the first ``max_tokens`` tokens of each document, all if it is None; ``num_prompt`` are the prompt."""
        hub, folder = self.data or "emozilla/pg19-test", self.data or self.folder
        data = held_out(self, hub, folder, (self.split,) if self.split else ("test", "validation"), self.subset)
        for number, text in enumerate(held_out_texts(data, self.text_field)):
            ids = first_tokens(tokenizer, text, max_tokens)
            yield Sample(f"{number}", ids[:num_prompt], answers=[ids[num_prompt:]])


@dataclass(frozen=True)
class Continuation(Documents, PromptTask):
    """Perplexity of a document's continuation after its evicted first tokens; one document is one sample."""

    prompt: PositiveInt = 512  # tokens
    continuation: PositiveInt = 64  # tokens scored after it

    def read(self, tokenizer: Tokenizer, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Read the documents; see :meth:`ag.evaluate.tasks.Task.read`."""
        length = self.prompt + self.continuation
        if length > max_tokens:
            raise UserError(
                f"Task {self.name}: prompt={self.prompt} and continuation={self.continuation} exceed the model's "
                f"context of {max_tokens} tokens; give fewer."
            )
        for document in self.documents(tokenizer, self.prompt, length):
            yield document if len(document.target_tokens) == self.continuation else "too short"

    def answer(
        self, model: nn.Module, tokenizer: Tokenizer, cache: EvictionCache, last_hidden: Tensor, sample: Sample
    ) -> tuple[float, Tags]:
        """Return the continuation's mean negative log-likelihood."""
        return mean_nats(model, cache, last_hidden, sample.target_tokens), {}


@dataclass(frozen=True)
class Stream(Documents):
    """Perplexity of complete books while tokens are evicted, as in StreamingLLM's experiments on PG-19.

    The first block is the prompt. Later passes have ``step`` tokens, or one interval of the policy: with
    ``schedule=steps:step`` all policies have equal passes. A budget keeps the cache's size (a share is a share of the
    first block). Flags of gates that act on every token (``gate.covers=all``) keep a share of the text.

    The kept share is a mean over the tokens after the first block: the cached share of all read tokens, after the
    token's pass. The bytes are measured at the end. The tags ``nats@N`` and ``held@N`` are means of nats and kept share
    over the ``bin`` tokens from N on; ``held@end`` is the share at the end. In a book that fits the model's context one
    token of 64 is compared with a full cache (``kl``, ``same_top1``).
    """

    block: PositiveInt = 512  # tokens of the first forward pass
    step: PositiveInt = 64  # tokens of a later pass, for policies without an interval
    tokens: PositiveInt | None = None  # read of each book; None: all
    bin: PositiveInt = 1024  # tokens of a point of the curve, and of a block; policies are paired by blocks

    folder: ClassVar[str] = "pg19_style"
    unit: ClassVar[str] = "books"

    def read(self, tokenizer: Tokenizer, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Read the books; see :meth:`ag.evaluate.tasks.Task.read`. No book is too long: `run` checks policies."""
        for book in self.documents(tokenizer, self.block, self.tokens):
            yield book if book.target_tokens else "too short"

    def length(self, sample: Sample) -> int:
        """Return the tokens of a book."""
        return len(sample.prompt) + len(sample.target_tokens)

    def run(self, model: nn.Module, tokenizer: Tokenizer, policies: Sequence[Policy], samples: Samples) -> Outcomes:
        """Run policies over books; see :meth:`ag.evaluate.tasks.Task.run`."""
        longest = max(map(self.length, samples), default=0)
        context: int = model.config.get_text_config().max_position_embeddings  # type: ignore[operator, union-attr]
        for checked in policies:
            self._check(checked, attached_gates(model), longest, context)
        device = next(model.parameters()).device
        for book in samples:
            compared = [policy("full")] if self.length(book) <= context else []
            caches = read_prompt(model, [*compared, *policies], torch.tensor([book.prompt], device=device))
            full = self._score_stream(model, *caches.pop(0), book, True)[2] if compared else None
            for index in range(len(policies)):
                cache, last_hidden = caches.pop(0)
                # scoring after this counts in the time of the stream
                seconds, start = cache.scoring_seconds, synchronised_time(device)
                nats, kept_shares, log_probs = self._score_stream(model, cache, last_hidden, book, bool(compared))
                seconds += synchronised_time(device) - start
                tags = {} if full is None else distance(full, log_probs)
                tags |= {"held@end": cache.kept_share()}
                for name, values in (("nats", nats), ("held", kept_shares)):
                    for number, values_of_bin in enumerate(values.split(self.bin)):
                        tags[f"{name}@{self.block + number * self.bin}"] = float(values_of_bin.mean())
                over = bool(cache.over_budget.any())
                sizes = self.length(book), float(kept_shares.mean()), cache.nbytes
                yield index, Outcome(book.id, float(nats.mean()), *sizes, seconds, tags, over)

    def _check(self, policy: Policy, attached: AttentionGates | None, longest: int, context: int) -> None:
        gates = policy.gates or attached
        if policy.by_gates and policy.budget is None and gates is not None and gates.config.covers != "all":
            raise UserError(
                f"Task {self.name}: {policy!r}: these gates (gate.covers=prompt) evict nothing after the first block, "
                "so that the cache grows; train gates with gate.covers=all, or give a budget and a schedule."
            )
        if policy.scorer is not None and policy.budget is not None and policy.steps is None:
            raise UserError(
                f"Task {self.name}: {policy!r} evicts nothing after the first block, so that its cache grows; give "
                "schedule=every or schedule=steps:n."
            )
        if longest > context and policy.positions == "original":
            raise UserError(
                f"Task {self.name}: {policy!r}: {longest} tokens exceed the model's context of {context}, beyond which "
                f"only policies with positions=interpolated or positions=slot work; give tokens={context} or fewer."
            )

    @torch.no_grad()
    def _score_stream(
        self, model: nn.Module, cache: EvictionCache, last_hidden: Tensor, book: Sample, compares: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Feed the remaining tokens of a book to a cache.

        Returns:
            NLL of each token, and the kept share after its pass, ``[T]`` float32 on the CPU; and the log-probabilities
            ``[N, V]`` at the first token and each :data:`COMPARED`-th after it, without ``compares`` of no token.
        """
        nats, compared_log_probs, kept_shares = list[Tensor](), list[Tensor](), list[float]()
        remaining = torch.tensor(book.target_tokens, device=last_hidden.device)
        for tokens in remaining.split(cache.policy.steps or self.step):
            states = feed(model, cache, tokens[None])[0]
            logits = lm_logits(model, torch.cat([last_hidden, states[:-1]])).float()
            nats.append(F.cross_entropy(logits, tokens, reduction="none").cpu())
            if compares:
                compared_log_probs.append(logits[-len(kept_shares) % COMPARED :: COMPARED].log_softmax(-1))
            kept_shares += [cache.kept_share()] * len(tokens)
            last_hidden = states[-1:]
        log_probs = torch.cat(compared_log_probs) if compares else last_hidden.new_zeros(0, 0)
        return torch.cat(nats), torch.tensor(kept_shares), log_probs


def first_tokens(tokenizer: Tokenizer, text: str, number: int | None) -> list[int]:
    """Return the first ``number`` tokens of a text, including start tokens. None: all tokens."""
    part = text if number is None else text[: LETTERS * number]
    ids = tokenize_prompt(tokenizer, part)
    if number is not None and len(ids) <= number and len(part) < len(text):
        return first_tokens(tokenizer, text, None)[:number]
    return ids[:number]
