"""Tasks: generators of samples (a context, a question about it, its answers) with a score for each."""

from __future__ import annotations

import copy
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.engine import EvictionCache, Policy, policy, read_prompt
from ag.evaluate.tasks.follow import distance, feed, log_probabilities

Tags = Mapping[str, str | int | float]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveInts = Annotated[Sequence[PositiveInt], Field(min_length=1)]
LeftOut = Literal["too long", "too short"]
POSITION = "position"  # kind of the parts of a text: blocks of tokens, named by their first position
PART = re.compile(r"(score|nats)@(?:([a-z]+) (.+)|(\d+))")  # the tag of a part: measure, kind and name, or position


@dataclass(frozen=True)
class Sample:
    """A context, a question about it, and its answers.

    Attributes:
        id: name of the sample, equal in every run.
        prompt: tokens ``[T]`` of the context. The policy evicts from these.
        question: tokens that are read between the prompt and an answer; empty if they are the end of the prompt.
        answers: tokens of each right answer; in multiple choice the tokens of each choice.
        target: index of the answer that compares caches with a full cache; in multiple choice the right answer.
        max_new_tokens: largest number of tokens of a generated answer; 0 if nothing is generated.
        references: texts that grade a generated answer.
        tags: properties of the sample, which are also in its outcomes.
        protect: spans of the prompt that no policy evicts; see :meth:`ag.EvictionCache.protect`.
        parts: data that only its task reads (the turns of a conversation).
    """

    id: str
    prompt: list[int]
    _: KW_ONLY
    question: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    target: int = 0
    max_new_tokens: int = 0
    references: list[str] = field(default_factory=list)
    tags: Tags = field(default_factory=dict)
    protect: list[tuple[int, int]] = field(default_factory=list)
    parts: Sequence[Any] = ()

    @property
    def tokens(self) -> int:
        """Tokens of prompt, question and the longest generated answer."""
        return len(self.prompt) + len(self.question) + self.max_new_tokens

    @property
    def target_tokens(self) -> list[int]:
        """Tokens of the target; empty if the sample has no answers."""
        return self.answers[self.target] if self.answers else []


Samples = Sequence[Sample]


@dataclass(frozen=True)
class Outcome:
    """The result of a policy on one sample.

    Attributes:
        sample: its id.
        score: the task's metric: accuracy 0 or 1, nats per token, F1 in 0..1, ...
        tokens: tokens of the prompt; of the complete text if decoding evicts (books, worked problems).
        kept: kept share of their (token, layer, KV head) entries, measured in the cache after the prompt, or while
            decoding evicts.
        kv_bytes: bytes allocated for keys and values after the prompt, or at the end if decoding evicts.
        seconds: time of eviction, question and answer; without the prompt, which policies read together.
        tags: tags of the sample, and further measures. ``nats`` is the mean negative log-likelihood of the right
            answer's tokens, ``hits`` is 1 if each token is the likeliest; ``kl`` and ``same_top1`` compare with a full
            cache, see :meth:`PromptTask.run`.
        over_budget: whether more tokens were protected than the budget allows.
    """

    sample: str
    score: float
    tokens: int
    kept: float
    kv_bytes: int
    seconds: float
    tags: Tags = field(default_factory=dict)
    over_budget: bool = False

    @property
    def parts(self) -> dict[str, dict[str, dict[str, float]]]:
        """The tags of parts by kind of part, measure and name: of :func:`by_part`, and ``nats@N`` of blocks."""
        measures_by_kind: dict[str, dict[str, dict[str, float]]] = {}
        for tag, value in self.tags.items():
            if match := PART.fullmatch(tag):
                measure, kind, name, position = match.groups()
                parts = measures_by_kind.setdefault(kind or POSITION, {}).setdefault(measure, {})
                parts[name or position] = float(value)
        return measures_by_kind


@dataclass(frozen=True)
class Loaded:
    """The samples of a task.

    Attributes:
        samples: samples that can be run, in their stored order.
        too_long: number of samples before the last one that do not fit the model.
        too_short: number of samples before the last one that have fewer tokens than the task needs.
    """

    samples: list[Sample]
    too_long: int = 0
    too_short: int = 0


@dataclass(frozen=True)
class Task(ABC):
    """A task; its fields are its options, which :func:`ag.evaluate.tasks.make` checks by their types.

    Attributes:
        name: its name in commands.
        root: local folder of the data. None: the Hugging Face hub.
    """

    name: str
    root: str | None = None

    metric: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    #: Name of its samples, in the plural.
    unit: ClassVar[str] = "samples"

    def identity(self) -> dict[str, Any]:
        """Return everything that the samples and their scores depend on, for JSON."""
        return asdict(self)

    def load(self, tokenizer: Tokenizer, limit: int | None, max_tokens: int) -> Loaded:
        """Read and tokenise the samples.

        Args:
            tokenizer: the model's.
            limit: largest number of samples that can be run. None: all samples.
            max_tokens: the model's context; a sample with its answer must fit.

        Raises:
            UserError: the data is missing or damaged; the message says how to get it.
        """
        samples: list[Sample] = []
        left_out: list[LeftOut] = []
        for sample_or_reason in self.read(tokenizer, max_tokens):
            if isinstance(sample_or_reason, Sample):
                samples.append(sample_or_reason)
            else:
                left_out.append(sample_or_reason)
            if len(samples) == limit:
                break
        return Loaded(samples, left_out.count("too long"), left_out.count("too short"))

    def floor(self, samples: Samples) -> float | None:
        """Return the mean score of a model that cannot do the task. None: unknown."""
        return None

    def length(self, sample: Sample) -> int:
        """Return the tokens of a sample that a policy may evict."""
        return len(sample.prompt)

    def reads_on(self, sample: Sample) -> bool:
        """Return whether tokens are read after a sample's prompt, and therefore after the eviction.

        The first token of an answer is predicted from the last token before it. If that is the last token of the
        prompt, it was read before the eviction: an answer of one token is predicted as with a full cache.
        """
        return bool(sample.question) or max([sample.max_new_tokens, *map(len, sample.answers)]) != 1

    @abstractmethod
    def read(self, tokenizer: Tokenizer, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Yield the samples in their stored order. For a sample that cannot be run, yield the reason instead.

        Args:
            tokenizer: the model's.
            max_tokens: the model's context.

        Raises:
            UserError: see :meth:`load`.
        """

    @abstractmethod
    def run(
        self, model: nn.Module, tokenizer: Tokenizer, policies: Sequence[Policy], samples: Samples
    ) -> Iterator[tuple[int, Outcome]]:
        """Run policies over samples, and yield (index of the policy, outcome) as each finishes.

        The order is sample by sample, and within a sample policy by policy. Policies with a dense prefill share one
        forward pass of the prompt.

        Raises:
            UserError: a policy cannot do the task.
        """


@dataclass(frozen=True)
class PromptTask(Task):
    """A task of samples with a prompt, which is read and evicted, perhaps a question, and an answer."""

    #: Whether its outcomes have ``kl`` and ``same_top1``. False if a sample has several right answers that all count.
    compares: ClassVar[bool] = True

    def run(
        self, model: nn.Module, tokenizer: Tokenizer, policies: Sequence[Policy], samples: Samples
    ) -> Iterator[tuple[int, Outcome]]:
        """Run policies over samples; see :meth:`Task.run`.

        The tags ``kl`` and ``same_top1`` compare each policy with a full cache on the tokens of the right answer; see
        :func:`ag.evaluate.tasks.follow.distance`.
        """
        device = next(model.parameters()).device
        for sample in samples:
            compared = [policy("full")] if sample.target_tokens and self.compares else []
            prompt, question = (torch.tensor([ids], device=device) for ids in (sample.prompt, sample.question))
            caches = read_prompt(model, [*compared, *policies], prompt, protect=sample.protect)
            full: Tensor | None = None
            for index in range(-len(compared), len(policies)):
                cache, last_hidden = caches.pop(0)  # freed before the next answer
                usage = cache.kept_share(), cache.nbytes
                # scoring after this counts in the time of the answer
                seconds, start = cache.scoring_seconds, _synchronised_time(device)
                if sample.question:
                    last_hidden = feed(model, cache, question)[:, -1]
                if index < 0:
                    full = log_probabilities(model, cache, last_hidden, sample.target_tokens)
                    continue
                seconds += _synchronised_time(device) - start
                cache_copy = None if full is None else copy.deepcopy(cache)
                start = _synchronised_time(device)
                score, tags = self.answer(model, tokenizer, cache, last_hidden, sample)
                seconds += _synchronised_time(device) - start
                over = bool(cache.over_budget.any())
                if full is not None and cache_copy is not None:
                    other = log_probabilities(model, cache_copy, last_hidden, sample.target_tokens)
                    tags = {**tags, **distance(full, other)}
                yield index, Outcome(sample.id, score, len(sample.prompt), *usage, seconds, tags, over)

    @abstractmethod
    def answer(
        self, model: nn.Module, tokenizer: Tokenizer, cache: EvictionCache, last_hidden: Tensor, sample: Sample
    ) -> tuple[float, Tags]:
        """Return the sample's score and tags.

        Args:
            model: the model.
            tokenizer: its tokenizer.
            cache: a cache that has read and evicted the prompt, and read the question; this method may change it.
            last_hidden: ``[1, d]``, the final hidden state of the last token before the answer.
            sample: a sample of :meth:`load`.
        """


def _synchronised_time(device: torch.device) -> float:
    """Return the time in seconds, after the GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def by_part(part_kind: str, measured: Iterable[tuple[str | int, float, float]]) -> dict[str, float]:
    """Return tags with the mean score and nats of each part of a sample. Reports have tables of these parts.

    Args:
        part_kind: kind of the parts (``turn``).
        measured: name, score and nats of each part. Entries with equal names are one part.
    """
    parts: dict[str | int, list[tuple[float, float]]] = {}
    for name, score, nats in measured:
        parts.setdefault(name, []).append((score, nats))
    return {
        f"{measure}@{part_kind} {name}": fmean(pair[i] for pair in pairs)
        for i, measure in enumerate(("score", "nats"))
        for name, pairs in parts.items()
    }
