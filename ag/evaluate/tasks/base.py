"""What a task is: a generator of samples (a context, a question about it, its answers), and a score of each."""

from __future__ import annotations

import copy
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from statistics import fmean
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ag.engine import EvictionCache, Policy, policy, read_prompt
from ag.errors import require
from ag.evaluate.tasks.follow import Likely, feed

Tags = Mapping[str, str | int | float]
LeftOut = Literal["too long", "too short"]
CURVE = "nats@"  # begins the tags that are the points of a curve over a text
PART = re.compile(r"(score|nats)@([a-z]+) (.+)")  # a tag of a part of a sample: the measure, what the part is, its name


@dataclass(frozen=True)
class Sample:
    """A context, a question about it, and its answers.

    Attributes:
        id: names it, the same in every run.
        prompt: tokens ``[T]`` of the context, from which a policy evicts.
        question: tokens that are read between the prompt and an answer; empty where the prompt ends with them.
        answers: tokens of each right answer; of multiple choice those of each choice.
        target: index of the answer on which caches are compared with a full one; of multiple choice the right one.
        most: tokens that a generated answer may have; 0 where nothing is generated.
        references: texts that a generated answer is graded by.
        tags: what tells it apart, which goes into its outcomes.
        protect: spans of the prompt that no policy evicts; see :meth:`ag.EvictionCache.protect`.
        parts: what only its task reads, such as the turns of a conversation.
    """

    id: str
    prompt: list[int]
    _: KW_ONLY
    question: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    target: int = 0
    most: int = 0
    references: list[str] = field(default_factory=list)
    tags: Tags = field(default_factory=dict)
    protect: list[tuple[int, int]] = field(default_factory=list)
    parts: Sequence[Any] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the longest text that is read or written: prompt, question and a generated answer."""
        return len(self.prompt) + len(self.question) + self.most

    @property
    def right(self) -> list[int]:
        """Tokens of the target; empty where the sample has no answers."""
        return self.answers[self.target] if self.answers else []


Samples = Sequence[Sample]


@dataclass(frozen=True)
class Outcome:
    """What a policy made of one sample.

    Attributes:
        sample: its id.
        score: the task's metric on it: accuracy 0 or 1, nats per token, F1 in 0..1, ...
        tokens: tokens of the prompt; where eviction goes on (books, worked problems) all that were seen.
        kept: share of their (token, layer, KV head) entries that was held after the prompt, or while eviction went on,
            measured in the cache.
        kv_bytes: allocated for keys and values after the prompt, or at the end.
        seconds: time of the decision, of question and answer; without the prompt, which policies read together.
        tags: those of the sample, and measures beside the score. ``nats`` is the mean negative log-likelihood of the
            right answer's tokens, ``hits`` 1 where each is the likeliest; ``kl`` and ``same_top1`` compare with a full
            cache, see :meth:`PromptTask.run`.
        over_budget: whether more was protected than the budget allows, and stayed.
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
    def blocks(self) -> dict[int, float]:
        """Mean nats of each block of a text, by the position that it begins with; empty where no tag ``nats@N`` is."""
        found = {name.removeprefix(CURVE): float(x) for name, x in self.tags.items() if name.startswith(CURVE)}
        return {int(start): nats for start, nats in found.items() if start.isdigit()}

    @property
    def parts(self) -> dict[str, dict[str, dict[str, float]]]:
        """What :func:`by_part` said: by what parts are, measure and name of a part; empty where a sample has none."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for tag, value in self.tags.items():
            if match := PART.fullmatch(tag):
                measure, what, name = match.groups()
                found.setdefault(what, {}).setdefault(measure, {})[name] = float(value)
        return found

    def numbered(self, what: str) -> dict[int, float]:
        """Return the nats of parts that have numbers for names, such as turns."""
        return {int(name): nats for name, nats in self.parts.get(what, {}).get("nats", {}).items()}


@dataclass(frozen=True)
class Loaded:
    """The samples of a task.

    Attributes:
        samples: those that can be run, in their stored order.
        too_long: how many were left out on the way because they do not fit the model.
        too_short: how many were left out on the way because they have fewer tokens than the task needs.
    """

    samples: list[Sample]
    too_long: int = 0
    too_short: int = 0


@dataclass(frozen=True)
class Task(ABC):
    """A task; its fields are its options.

    Attributes:
        name: what the command calls it.
        root: local folder of the data; None means the Hugging Face hub.
    """

    name: str
    root: str | None = None

    metric: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    #: What its samples are, in the plural.
    unit: ClassVar[str] = "samples"

    def identity(self) -> dict[str, Any]:
        """Return all that the samples and their scores depend on, as JSON can hold it."""
        return asdict(self)

    def load(self, tokenizer: PreTrainedTokenizerBase, limit: int | None, max_tokens: int) -> Loaded:
        """Read and tokenise the samples.

        Args:
            tokenizer: the model's.
            limit: how many of the samples that can be run are taken; None means all. The others are counted.
            max_tokens: the model's context; a sample with its answer must fit.

        Raises:
            UserError: the data is missing or damaged; the message says how to get it.
        """
        samples: list[Sample] = []
        left: list[LeftOut] = []
        for one in self.read(tokenizer, max_tokens):
            if isinstance(one, Sample):
                samples.append(one)
            else:
                left.append(one)
            if len(samples) == limit:
                break
        return Loaded(samples, left.count("too long"), left.count("too short"))

    def floor(self, samples: Samples) -> float | None:
        """Return the mean score up to which a model shows nothing on these samples; None means that there is none."""
        return None

    def length(self, sample: Sample) -> int:
        """Return the tokens of a sample that a policy may evict."""
        return len(sample.prompt)

    def reads_on(self, sample: Sample) -> bool:
        """Return whether tokens are read behind a sample's prompt, which see what was kept of it.

        The first token of an answer is predicted from the last token before it. Where that is the prompt's last one,
        and earlier tokens are evicted when the prompt is over, it is predicted as with a full cache: an answer of one
        token says nothing of what was evicted.
        """
        return bool(sample.question) or max([sample.most, *map(len, sample.answers)]) != 1

    def instead(self) -> str:
        """Return the option with which tokens are read behind the prompts; empty where there is none."""
        return ""

    @abstractmethod
    def read(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Yield the samples in their stored order, and in the place of one that cannot be run the reason.

        Args:
            tokenizer: the model's.
            max_tokens: the model's context.

        Raises:
            UserError: see :meth:`load`.
        """

    @abstractmethod
    def run(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, policies: Sequence[Policy], samples: Samples
    ) -> Iterator[tuple[int, Outcome]]:
        """Run policies over samples, and yield (index of the policy, outcome) as each is done.

        Sample by sample, and for each sample policy by policy: policies that read the prompt densely share one forward
        pass of it.

        Raises:
            UserError: a policy cannot do the task.
        """


@dataclass(frozen=True)
class PromptTask(Task):
    """A task whose samples are a prompt, which is read and evicted, maybe a question, and an answer."""

    def run(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, policies: Sequence[Policy], samples: Samples
    ) -> Iterator[tuple[int, Outcome]]:
        """Run policies over samples; see :meth:`Task.run`.

        The tags ``kl`` and ``same_top1`` say how far each policy is from a full cache before each token of the right
        answer: means of the divergence in nats, and of whether the likeliest token is the same.
        """
        device = next(model.parameters()).device
        for sample in samples:
            compared = [policy("full")] if sample.right else []
            prompt = torch.tensor([sample.prompt], device=device)
            caches = read_prompt(model, [*compared, *policies], prompt, protect=sample.protect)
            question = torch.tensor([sample.question], device=device) if sample.question else None

            def asked(cache: EvictionCache, last: Tensor, question: Tensor | None = question) -> Tensor:
                return last if question is None else feed(model, cache, question)[:, -1]

            full = None
            if compared:
                cache, last = caches.pop(0)
                full = Likely.of(model, cache, asked(cache, last), sample.right)
            for index in range(len(policies)):
                cache, last = caches.pop(0)  # freed before the next answer
                held = cache.kept_share(), cache.nbytes
                start = time.perf_counter()
                last = asked(cache, last)
                twin = None if full is None else copy.deepcopy(cache)
                score, tags = self.answer(model, tokenizer, cache, last, sample)
                seconds = time.perf_counter() - start + cache.scoring_seconds
                over = bool(cache.over_budget.any())
                if full is not None and twin is not None:
                    tags = {**tags, **full.distance(Likely.of(model, twin, last, sample.right))}
                yield index, Outcome(sample.id, score, len(sample.prompt), *held, seconds, tags, over)

    @abstractmethod
    def answer(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, cache: EvictionCache, last: Tensor, sample: Sample
    ) -> tuple[float, Tags]:
        """Return the sample's score and tags.

        Args:
            model: the model.
            tokenizer: its tokenizer.
            cache: has read and evicted the prompt, and has read the question; this sample's own.
            last: ``[1, d]``, the final hidden state of the last token before the answer.
            sample: one of those that :meth:`load` gave.
        """


def require_whole(task: Task, *names: str, least: int = 1) -> None:
    """Require that options are whole numbers, lists of them where the default is one, or None where that is it.

    Raises:
        UserError: one is something else, or lower than ``least``.
    """
    defaults: dict[str, Any] = {one.name: one.default for one in fields(task)}
    for name in names:
        value, several = getattr(task, name), isinstance(defaults[name], tuple)
        numbers = value if several and isinstance(value, list | tuple) else [value]
        fits = len(numbers) > 0 and all(type(number) is int and number >= least for number in numbers)
        what = f"numbers, for example {list(defaults[name])}" if several else f"a whole number, at least {least}"
        require(task, name, fits or (value is None and defaults[name] is None), what)


def by_part(what: str, found: Iterable[tuple[str | int, float, float]]) -> dict[str, float]:
    """Return tags with the mean score and nats of each part of a sample, which reports show apart.

    Args:
        what: what parts are, such as ``turn``.
        found: name, score and nats; parts of one name are one part.
    """
    parts: dict[str | int, list[tuple[float, float]]] = {}
    for name, score, nats in found:
        parts.setdefault(name, []).append((score, nats))
    return {
        f"{measure}@{what} {name}": fmean(pair[i] for pair in pairs)
        for i, measure in enumerate(("score", "nats"))
        for name, pairs in parts.items()
    }
