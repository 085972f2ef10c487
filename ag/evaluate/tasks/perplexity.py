"""Perplexity of plain documents: after an evicted prompt, and of whole books while tokens are evicted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from ag.data.collate import start_tokens, tokenize
from ag.engine import EvictionCache, Policy, policy, read_prompt
from ag.errors import UserError
from ag.evaluate.tasks.base import LeftOut, Outcome, PromptTask, Sample, Tags, Task, distance, require_whole
from ag.evaluate.tasks.follow import Likely, feed, score
from ag.evaluate.tasks.held_out import HeldOut
from ag.gates.attach import attached_gates
from ag.gates.gate import AttentionGates
from ag.model.hooks import lm_logits

COMPARED = 64  # of so many tokens of a book one is compared with what a full cache says
LETTERS = 32  # per token, more than any text has on average: what is tokenised of a book


@dataclass(frozen=True)
class Document(Sample):
    """A document."""

    following: list[int]  # tokens after the prompt


@dataclass(frozen=True)
class Documents(Task):
    """Where the documents are.

    Attributes:
        data: hub id, or folder under ``root``; None: PG-19 on the hub, ``corpus`` (``pg19_style`` for books) in a root.
        subset: configuration name on the hub.
        split: None: test, or where there is none, validation.
        text_field: the field that holds a document.
    """

    data: str | None = None
    subset: str | None = None
    split: str | None = None
    text_field: str = "text"

    metric: ClassVar[str] = "nats per token"
    higher_is_better: ClassVar[bool] = False
    unit: ClassVar[str] = "documents"
    folder: ClassVar[str] = "corpus"

    def texts(self) -> Iterator[str]:
        """Return the documents in their stored order."""
        hub, folder = self.data or "emozilla/pg19-test", self.data or self.folder
        splits = (self.split,) if self.split else ("test", "validation")
        return HeldOut(self.name, self.root, hub, folder, splits, self.subset).texts(self.text_field)


def first_tokens(tokenizer: PreTrainedTokenizerBase, text: str, number: int | None) -> list[int]:
    """Return the first tokens of a text, what the tokenizer starts texts with included; None: all."""
    part = text if number is None else text[: LETTERS * number]
    ids = start_tokens(tokenizer) + tokenize(tokenizer, [part])[0]
    if number is not None and len(ids) <= number and len(part) < len(text):
        return first_tokens(tokenizer, text, None)[:number]
    return ids[:number]


@dataclass(frozen=True)
class Continuation(Documents, PromptTask):
    """Perplexity of a document's continuation after its evicted first tokens; one document is one sample.

    Attributes:
        prompt: tokens of the prompt.
        continuation: tokens scored after it.
    """

    prompt: int = 512
    continuation: int = 64

    def __post_init__(self) -> None:
        """Check the lengths."""
        require_whole(self, "prompt", "continuation")

    def read(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Read the documents; see :meth:`ag.evaluate.tasks.Task.read`."""
        length = self.prompt + self.continuation
        if length > max_tokens:
            raise UserError(
                f"Task {self.name}: prompt={self.prompt} and continuation={self.continuation} exceed the model's "
                f"context of {max_tokens} tokens; give fewer."
            )
        for number, text in enumerate(self.texts()):
            ids = first_tokens(tokenizer, text, length)
            document = Document(f"{number}", ids[: self.prompt], ids[self.prompt :])
            yield document if len(ids) == length else "too short"

    def right(self, sample: Document) -> list[int]:
        """Return the tokens of the continuation."""
        return sample.following

    def longest(self, sample: Document) -> int:
        """Return the tokens of the continuation."""
        return len(sample.following)

    def instead(self) -> str:
        """Return the option with which more than one token follows."""
        return f"task_options.{self.name}.continuation=2"

    def answer(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, cache: EvictionCache, last: Tensor, sample: Document
    ) -> tuple[float, Tags]:
        """Return the continuation's mean negative log-likelihood."""
        return -float(score(model, cache, last, [sample.following])[0][0].mean()), {}


@dataclass(frozen=True)
class Stream(Documents):
    """Perplexity of whole books while tokens are evicted, as in StreamingLLM's experiments on PG-19.

    The first block is the prompt. What follows comes ``step`` tokens at once, or as many as lie between two evictions
    of the policy: with ``schedule=steps:step`` every policy is fed alike. A budget keeps the cache's size (a share is
    one of the first block), the flags of gates that act on every token (``gate.covers=all``) a share of the text.

    The kept share is the mean over all tokens after the first block of what was held after the pass that a token came
    with, as a share of the tokens seen by then; the bytes are those at the end. The tags are the curve: ``nats@N``
    and ``held@N`` are the means over the ``bin`` tokens from N on; ``held@end`` is the share at the end. Within the
    model's context one token of 64 is compared with what a full cache says of it (``kl``, ``same_top1``).

    Attributes:
        block: tokens of the first forward pass.
        step: tokens of a later one, for policies whose schedule does not say it.
        tokens: only the first so many of each book; None: all.
        bin: tokens of a point of the curve, which are also the blocks that differences of policies are paired by.
    """

    block: int = 512
    step: int = 64
    tokens: int | None = None
    bin: int = 1024

    folder: ClassVar[str] = "pg19_style"
    unit: ClassVar[str] = "books"

    def __post_init__(self) -> None:
        """Check the lengths."""
        require_whole(self, "block", "step", "bin", "tokens")

    def read(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Read the books; see :meth:`ag.evaluate.tasks.Task.read`. None is too long: policies say what they can do."""
        for number, text in enumerate(self.texts()):
            ids = first_tokens(tokenizer, text, self.tokens)
            book = Document(f"{number}", ids[: self.block], ids[self.block :])
            yield book if len(ids) > self.block else "too short"

    def run(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, policies: Sequence[Policy], samples: Sequence[Any]
    ) -> Iterator[tuple[int, Outcome]]:
        """Run policies over books; see :meth:`ag.evaluate.tasks.Task.run`."""
        longest = max((len(book.prompt) + len(book.following) for book in samples), default=0)
        context: int = model.config.get_text_config().max_position_embeddings  # type: ignore[operator, union-attr]
        for one in policies:
            self._check(one, attached_gates(model), longest, context)
        device = next(model.parameters()).device
        for book in samples:
            following = torch.tensor(book.following, device=device)
            readers = [*([policy("full")] if longest <= context else []), *policies]
            caches = read_prompt(model, readers, torch.tensor([book.prompt], device=device))
            full = self._read(model, *caches.pop(0), following) if longest <= context else None
            for index in range(len(policies)):
                cache, last = caches.pop(0)
                start = time.perf_counter()
                found = self._read(model, cache, last, following)
                seconds = time.perf_counter() - start
                first = len(book.prompt)
                tags = found.tags(first, self.bin) | {"held@end": cache.kept_share()}
                tags |= {} if full is None else distance(full.some.divergence(found.some))
                held = first + len(found.nats), float(found.held.mean()), cache.nbytes
                over = bool(cache.over_budget.any())
                yield index, Outcome(book.id, float(found.nats.mean()), *held, seconds, tags, over)

    def length(self, sample: Document) -> int:
        """Return the tokens of a book."""
        return len(sample.prompt) + len(sample.following)

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

    def _read(self, model: nn.Module, cache: EvictionCache, last: Tensor, tokens: Tensor) -> _Curve:
        """Feed a book's tokens to a cache and score each of them."""
        nats, some, held = list[Tensor](), list[Tensor](), list[float]()
        for part in tokens.split(cache.policy.steps or self.step):
            with torch.no_grad():
                states = feed(model, cache, part[None])[0]
                logits = lm_logits(model, torch.cat([last, states[:-1]])).float()
                nats.append(F.cross_entropy(logits, part, reduction="none").cpu())
                some.append(logits[-len(held) % COMPARED :: COMPARED].log_softmax(-1))
            held += [cache.kept_share()] * len(part)
            last = states[-1:]
        return _Curve(torch.cat(nats), torch.tensor(held), Likely(torch.cat(some)))


class _Curve(NamedTuple):
    """What became of each token of a book after the first block, ``[T]`` float32 on the CPU."""

    nats: Tensor  # negative log-likelihood
    held: Tensor  # share of the tokens seen that was held after its pass
    some: Likely  # of the first token, and of every COMPARED-th one behind it

    def tags(self, first: int, size: int) -> dict[str, float]:
        """Return the means over bins of so many tokens, by the position that each begins with."""
        return {
            f"{name}@{first + index * size}": float(part.mean())
            for name, values in (("nats", self.nats), ("held", self.held))
            for index, part in enumerate(values.split(size))
        }
