"""Tasks: generators of samples (a context, a question about it, its answers) with a score for each."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
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
HUB, GENERATED = "the Hugging Face hub", "generated samples"  # where samples come from, if not from a folder
POSITION = "position"  # kind of the parts of a text: blocks of tokens, named by their first position
PART = re.compile(r"(score|nats)@(?:([^\W\d]\w*) (.+)|(\d+))")  # the tag of a part: measure, kind and name, or position


@dataclass(frozen=True)
class Sample:
    """A context, a question about it, and its answers."""

    id: str  # equal in every run
    prompt: list[int]  # tokens of the context, which the policy evicts from
    _: KW_ONLY
    question: list[int] = field(default_factory=list)  # tokens between the prompt and an answer
    answers: list[list[int]] = field(default_factory=list)  # tokens of each right answer, or of each choice
    target: int = 0  # index of the answer that compares caches with a full cache; of choices the right one
    max_new_tokens: int = 0  # most tokens of a generated answer
    references: list[str] = field(default_factory=list)  # texts that grade a generated answer
    tags: Tags = field(default_factory=dict)  # properties, which are also in the outcomes
    protect: list[tuple[int, int]] = field(default_factory=list)  # spans of the prompt, see ag.EvictionCache.protect
    parts: Sequence[Any] = ()  # data that only its task reads (the turns of a conversation)

    @property
    def target_tokens(self) -> list[int]:
        """Tokens of the target; empty if the sample has no answers."""
        return self.answers[self.target] if self.answers else []

    @property
    def content_hash(self) -> str:
        """Hash of everything but the id."""
        content = json.dumps(asdict(replace(self, id="")), default=lambda part: type(part).__name__)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


Samples = Sequence[Sample]


@dataclass(frozen=True)
class Outcome:
    """The result of a policy on one sample.

    The tag ``nats`` is the mean negative log-likelihood of the right answer's tokens, ``hits`` is 1 if each is the
    likeliest token, and ``kl`` and ``same_top1`` compare with a full cache, see :meth:`PromptTask.run`.
    """

    sample: str  # its id
    score: float  # the task's metric: accuracy 0 or 1, nats per token, F1 in 0..1, ...
    tokens: int  # of the prompt; of the complete text if decoding evicts (books, worked problems)
    kept: float  # kept share of their (token, layer, KV head) entries, after the prompt or while decoding evicts
    kv_bytes: int  # allocated for keys and values after the prompt, or at the end if decoding evicts
    seconds: (
        float  # of eviction, question, answer, and an equal part of what policies write together; not of the prompt
    )
    tags: Tags = field(default_factory=dict)  # tags of the sample, and further measures
    over_budget: bool = False  # whether more tokens were protected than the budget allows
    content_hash: str = ""  # of the sample; empty in results of earlier versions

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


Outcomes = Iterator[tuple[int, Outcome]]  # with the index of the policy


@dataclass(frozen=True)
class Loaded:
    """The samples of a task, and how many before the last one were left out."""

    samples: list[Sample]
    too_long: int = 0  # they do not fit the model
    too_short: int = 0  # they have fewer tokens than the task needs


@dataclass(frozen=True)
class Task(ABC):
    """A task; its fields are its options, which :func:`ag.evaluate.tasks.make` checks by their types."""

    name: str  # in commands
    root: str | None = None  # local folder of the data; None: the Hugging Face hub

    metric: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    unit: ClassVar[str] = "samples"  # name of its samples, in the plural
    chance: ClassVar[float | None] = None  # see floor

    def identity(self) -> dict[str, Any]:
        """Return everything that the samples and their scores depend on, for JSON."""
        return asdict(self)

    @property
    def source(self) -> str:
        """Where the samples come from: a folder, the hub, or a generator."""
        return HUB if self.root is None else self.root

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
        return self.chance

    def length(self, sample: Sample) -> int:
        """Return the tokens of a sample that a policy may evict."""
        return len(sample.prompt)

    def reads_on(self, sample: Sample) -> bool:
        """Return whether tokens are read after a sample's prompt, and therefore after the eviction.

        If not, the one token of an answer is predicted from the prompt's last token, as with a full cache.
        """
        return bool(sample.question) or max([sample.max_new_tokens, *map(len, sample.answers)]) != 1

    @abstractmethod
    def read(self, tokenizer: Tokenizer, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Yield the samples in their stored order, and the reason in the place of one that cannot be run; see load."""

    @abstractmethod
    def run(self, model: nn.Module, tokenizer: Tokenizer, policies: Sequence[Policy], samples: Samples) -> Outcomes:
        """Run policies over samples, and yield (index of the policy, outcome) as each finishes.

        The order is sample by sample, and within a sample policy by policy. Policies with a dense prefill share one
        forward pass of the prompt.

        Raises:
            UserError: a policy cannot do the task.
        """


@dataclass(frozen=True)
class PromptTask(Task):
    """A task of samples with a prompt, which is read and evicted, perhaps a question, and an answer."""

    compares: ClassVar[bool] = True  # with a full cache; False if a sample has several right answers that all count

    def run(self, model: nn.Module, tokenizer: Tokenizer, policies: Sequence[Policy], samples: Samples) -> Outcomes:
        """Run policies over samples, and compare each with a full cache on the tokens of the right answer."""
        device = next(model.parameters()).device
        for sample in samples:
            compared = [policy("full")] if sample.target_tokens and self.compares else []
            prompt, question = (torch.tensor([ids], device=device) for ids in (sample.prompt, sample.question))
            states = read_prompt(model, [*compared, *policies], prompt, protect=sample.protect)
            full: Tensor | None = None
            if compared:
                cache, last_hidden = states.pop(0)
                last_hidden = feed(model, cache, question)[:, -1] if sample.question else last_hidden
                full = log_probabilities(model, cache, last_hidden, sample.target_tokens)
            outcomes = list[Outcome]()
            for index, (cache, last_hidden) in enumerate(states):
                usage = cache.kept_share(), cache.nbytes
                # scoring after this counts in the time of the answer
                seconds, start = cache.scoring_seconds, synchronised_time(device)
                last_hidden = feed(model, cache, question)[:, -1] if sample.question else last_hidden
                seconds += synchronised_time(device) - start
                states[index] = cache, last_hidden
                distances: dict[str, float] = {}
                if full is not None:
                    other = log_probabilities(model, copy.deepcopy(cache), last_hidden, sample.target_tokens)
                    distances = distance(full, other)
                start = synchronised_time(device)
                score, tags = self.answer(model, tokenizer, cache, last_hidden, sample)
                seconds += synchronised_time(device) - start
                outcomes.append(Outcome(sample.id, score, len(sample.prompt), *usage, seconds, {**tags, **distances}))
            start = synchronised_time(device)
            written = self.write(model, tokenizer, states, sample)
            shared_seconds = (synchronised_time(device) - start) / max(1, len(policies))
            for index, outcome in enumerate(outcomes):
                score, tags = written[index] if written else (outcome.score, {})
                over, tags = bool(states[index][0].over_budget.any()), {**outcome.tags, **tags}
                seconds = outcome.seconds + shared_seconds
                yield index, replace(outcome, score=score, seconds=seconds, tags=tags, over_budget=over)

    @abstractmethod
    def answer(
        self, model: nn.Module, tokenizer: Tokenizer, cache: EvictionCache, last_hidden: Tensor, sample: Sample
    ) -> tuple[float, Tags]:
        """Return the sample's score and tags.

        Args:
            model: the model.
            tokenizer: its tokenizer.
            cache: has read and evicted the prompt, and read the question; this method may change it.
            last_hidden: ``[1, d]``, the final hidden state of the last token before the answer.
            sample: a sample of :meth:`load`.
        """

    def write(
        self, model: nn.Module, tokenizer: Tokenizer, prompts: Sequence[tuple[EvictionCache, Tensor]], sample: Sample
    ) -> list[tuple[float, Tags]]:
        """Let the model write after each prompt, all policies in one batch, and return a score and tags for each.

        The scores replace those of :meth:`answer`, and the tags are added. Empty, as by default: the model does not
        write.

        Args:
            model: the model.
            tokenizer: its tokenizer.
            prompts: for each policy its cache and ``last_hidden``, as :meth:`answer` has left them.
            sample: a sample of :meth:`load`.
        """
        return []


def synchronised_time(device: torch.device) -> float:
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
    entries, values = list(measured), dict[str, list[float]]()
    for measure, column in (("score", 1), ("nats", 2)):
        for entry in entries:
            values.setdefault(f"{measure}@{part_kind} {entry[0]}", []).append(float(entry[column]))
    return {tag: fmean(tag_values) for tag, tag_values in values.items()}
