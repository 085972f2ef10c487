"""Questions about a context: when they are read, how likely the right answer is, and what the model says."""

from __future__ import annotations

import copy
import itertools
import re
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ag.data.collate import start_tokens, tokenize, tokenize_after
from ag.data.encode import divided
from ag.engine import EvictionCache
from ag.errors import require
from ag.evaluate.tasks.base import PromptTask, Sample, Tags
from ag.evaluate.tasks.follow import end_tokens, greedy, score

WHEN = ("after", "before")
FLOOR = 0.1
SPARE = 8  # tokens that an answer may be longer than the right one


class Puzzle(NamedTuple):
    """A context, what is asked about it, and the answer."""

    context: str  # what a policy evicts from
    question: str  # comes after it; its end may begin the answer
    references: list[str]  # what the answer must name
    right: list[str]  # right answers, word for word, with what separates them from the question
    parts: Sequence[Any] = ()  # what a task that asks for several things at once knows of each of them


@dataclass(frozen=True)
class Asked(Sample):
    """A context with a question."""

    text: str  # of both
    references: list[str]  # what the answer must name
    right: list[list[int]]  # tokens of right answers; the likeliest one counts
    most: int  # tokens that the answer may have
    tags: Tags  # what tells it apart


@dataclass(frozen=True)
class QuestionTask(PromptTask):
    """A task whose samples are a context and a question about it.

    Every right answer is scored under teacher forcing: the tag ``nats`` is the mean negative log-likelihood of the
    tokens of the likeliest one, ``hits`` is 1 where each of them is the likeliest token. Blank tokens before the first
    word do not count. Then the model answers greedily, and :meth:`grade` gives the score.

    Attributes:
        question: ``after``: the context is read and evicted before the question is known, as a cache that is used more
            than once has it. ``before``: the question is the end of the prompt, so that a policy can keep what it
            needs.
    """

    question: str = "after"

    #: Whether the model is made to answer; otherwise the score comes from the right answer's tokens alone.
    generates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check when the question is read."""
        require(self, "question", self.question in WHEN, " or ".join(WHEN))

    @abstractmethod
    def grade(self, text: str, sample: Any) -> float:
        """Return the score of what the model said."""

    def tally(self, likeliest: Tensor) -> float:
        """Return the score where the model says nothing, from flags ``[T]``: which right tokens are the likeliest."""
        return float(likeliest.all())

    def stops(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> tuple[Collection[int], int]:
        """Return the tokens that end an answer, and how many it has at least."""
        return end_tokens(model, tokenizer.eos_token_id), 0

    def floor(self, samples: Sequence[Any]) -> float | None:
        """Return 0.1; see :meth:`ag.evaluate.tasks.Task.floor`."""
        return FLOOR

    def right(self, sample: Any) -> list[int]:
        """Return the tokens of the first right answer."""
        return sample.right[0] if sample.right else []

    def longest(self, sample: Any) -> int:
        """Return the tokens of the longest right answer, or how many may be generated."""
        return max([sample.most if self.generates else 0, *map(len, sample.right)])

    def instead(self) -> str:
        """Return the option with which questions follow their contexts."""
        return f"task_options.{self.name}.question=after"

    def divide(self, context: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of a text as (prompt, question), by the option; ``context`` are those of its beginning."""
        return (whole, []) if self.question == "before" else divided(context, whole)

    def asked(
        self, tokenizer: PreTrainedTokenizerBase, name: str, puzzle: Puzzle, tags: Tags, most: int | None = None
    ) -> Asked:
        """Tokenise a puzzle; ``most`` tokens are generated, None: as the longest right answer and a few."""
        text = puzzle.context + puzzle.question
        whole = start_tokens(tokenizer) + tokenize(tokenizer, [text])[0]
        context = start_tokens(tokenizer) + tokenize(tokenizer, [puzzle.context])[0]
        prompt, question = self.divide(context, whole)
        right = tokenize_after(tokenizer, puzzle.right)
        most = max(map(len, right)) + SPARE if most is None else most
        tags = {**tags, "question": self.question}
        return Asked(name, prompt, text, puzzle.references, right, most, tags, question=question)

    def answer(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, cache: EvictionCache, last: Tensor, sample: Any
    ) -> tuple[float, Tags]:
        """Score the right answers, then let the model answer; see :meth:`ag.evaluate.tasks.base.PromptTask.answer`."""
        tags, found = dict(sample.tags), []
        for number, answer in enumerate(sample.right, start=1):  # one by one: there is memory for one more cache
            used_up = not self.generates and number == len(sample.right)
            [(nats, likeliest)] = score(model, cache if used_up else copy.deepcopy(cache), last, [answer])
            first = blanks(tokenizer, answer)
            found.append((float(-nats[first:].mean()), likeliest[first:]))
        if found:
            nats_of, likeliest = min(found, key=lambda pair: pair[0])
            tags |= {"nats": nats_of, "hits": float(likeliest.all())}
            if not self.generates:
                return self.tally(likeliest), tags
        stop, least = self.stops(model, tokenizer)
        text = str(tokenizer.decode(greedy(model, cache, last, sample.most, stop, least), skip_special_tokens=True))
        return self.grade(text, sample), {**tags, "answer": text}


def blanks(tokenizer: PreTrainedTokenizerBase, answer: list[int]) -> int:
    """Return how many tokens of an answer come before its first word."""
    blank = itertools.takewhile(lambda token: not str(tokenizer.decode([token])).strip(), answer[:-1])
    return sum(1 for _ in blank)


def share_named(text: str, references: Sequence[str]) -> float:
    """Return the share of the references that a text names, whatever the case: RULER's ``string_match_all``."""
    clean = re.sub(r"[\x00-\x1f]", "\n", text.strip()).lower()
    return sum(reference.lower() in clean for reference in references) / len(references)
