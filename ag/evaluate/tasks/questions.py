"""Questions about a context: when they are read, how likely the right answer is, and what the model says."""

from __future__ import annotations

import copy
import itertools
import re
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ag.data.collate import start_tokens, tokenize, tokenize_after
from ag.data.encode import divided
from ag.engine import EvictionCache
from ag.errors import require
from ag.evaluate.tasks.base import PromptTask, Sample, Samples, Tags
from ag.evaluate.tasks.follow import end_tokens, greedy, score

WHEN = ("after", "before")
FLOOR = 0.1
SPARE = 8  # tokens that an answer may be longer than the right one


class Puzzle(NamedTuple):
    """A sample before it is tokenised."""

    context: str  # what a policy evicts from
    question: str  # comes after it; its end may begin the answer
    references: list[str]  # what the answer must name
    right: list[str]  # right answers, word for word, with what separates them from the question
    parts: Sequence[Any] = ()  # what a task that asks for several things at once knows of each of them


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
    def grade(self, text: str, sample: Sample) -> float:
        """Return the score of what the model said."""

    def stops(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> tuple[Collection[int], int]:
        """Return the tokens that end an answer, and how many it has at least."""
        return end_tokens(model, tokenizer.eos_token_id), 0

    def floor(self, samples: Samples) -> float | None:
        """Return 0.1; see :meth:`ag.evaluate.tasks.Task.floor`."""
        return FLOOR

    def instead(self) -> str:
        """Return the option with which questions follow their contexts."""
        return f"task_options.{self.name}.question=after"

    def reads_on(self, sample: Sample) -> bool:
        """Return whether tokens follow the prompt; see :meth:`ag.evaluate.tasks.Task.reads_on`."""
        return super().reads_on(sample if self.generates else replace(sample, most=0))

    def asked(
        self, tokenizer: PreTrainedTokenizerBase, name: str, puzzle: Puzzle, tags: Tags, most: int | None = None
    ) -> Sample:
        """Tokenise a puzzle; ``most`` tokens are generated, None means as the longest right answer and a few."""
        start = start_tokens(tokenizer)
        whole = start + tokenize(tokenizer, [puzzle.context + puzzle.question])[0]
        context = start + tokenize(tokenizer, [puzzle.context])[0]
        prompt, question = (whole, []) if self.question == "before" else divided(context, whole)
        right = tokenize_after(tokenizer, puzzle.right)
        most = max(map(len, right)) + SPARE if most is None else most
        tags = {**tags, "question": self.question}
        asked = Sample(
            name, prompt, question=question, answers=right, most=most, references=puzzle.references, tags=tags
        )
        return replace(asked, **self.details(tokenizer, puzzle, context))

    def details(self, tokenizer: PreTrainedTokenizerBase, puzzle: Puzzle, context: list[int]) -> dict[str, Any]:
        """Return what is otherwise in the samples of a task; ``context`` are the tokens of the context alone."""
        return {}

    def answer(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, cache: EvictionCache, last: Tensor, sample: Sample
    ) -> tuple[float, Tags]:
        """Score the right answers, then let the model answer; see :meth:`ag.evaluate.tasks.base.PromptTask.answer`."""
        tags, found = dict(sample.tags), []
        for number, answer in enumerate(sample.answers, start=1):  # one by one: there is memory for one more cache
            used_up = not self.generates and number == len(sample.answers)
            [(nats, likeliest)] = score(model, cache if used_up else copy.deepcopy(cache), last, [answer])
            first = blanks(tokenizer, answer)
            found.append((float(-nats[first:].mean()), likeliest[first:]))
        if found:
            nats_of, likeliest = min(found, key=lambda pair: pair[0])
            tags |= {"nats": nats_of, "hits": float(likeliest.all())}
            if not self.generates:
                return float(likeliest.all()), tags
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
