"""Needles in haystacks, in the manner of RULER (https://arxiv.org/abs/2404.06654): generated, of any length.

A haystack is a short repeated filler or real text; needles are sentences put between its sentences. The model answers
greedily after the prompt was evicted. A sample depends on the options, its number and the tokenizer only.
"""

from __future__ import annotations

import itertools
import random
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ag.data.collate import start_tokens, tokenize
from ag.engine import EvictionCache
from ag.errors import UserError, require
from ag.evaluate.tasks.base import LeftOut, PromptTask, Sample, Tags
from ag.evaluate.tasks.follow import end_tokens, greedy

FILLER = (
    "The street is quiet this morning.",
    "A cat sleeps on the warm wall.",
    "The wind comes from the sea.",
    "Somebody opens a window and closes it again.",
    "Nothing else happens.",
)
SPARE = 8  # tokens that an answer may be longer than the right one


class Puzzle(NamedTuple):
    """What is hidden and asked.

    Attributes:
        intro: comes before the haystack.
        needles: the sentences; the first one stands at the depth of the grid, where there is one, else all are spread
            in this order.
        question: comes after the haystack.
        answers: what the answer must name.
    """

    intro: str
    needles: list[str]
    question: str
    answers: list[str]


@dataclass(frozen=True)
class Haystack(Sample):
    """A haystack with its question.

    Attributes:
        text: the prompt as text.
        answers: what the answer must name.
        most: tokens that the answer may have.
        tags: length, depth, repeat.
    """

    text: str
    answers: list[str]
    most: int
    tags: Tags


@dataclass(frozen=True)
class Needles(PromptTask):
    """What all kinds share.

    Attributes:
        lengths: prompt tokens, reached up to a sentence.
        repeats: samples of each length (and depth); ``limit`` cuts the last repeats.
        seed: of the generator.
    """

    lengths: Sequence[int] = (1024, 2048, 4096)
    repeats: int = 5
    seed: int = 0

    metric: ClassVar[str] = "exact match"
    unit: ClassVar[str] = "haystacks"
    word: ClassVar[str] = r"\d+"
    join: ClassVar[str] = ", "

    def __post_init__(self) -> None:
        """Check the numbers."""
        numbers = all(type(n) is int and n > 0 for n in self.lengths)
        require(self, "lengths", numbers and len(self.lengths) > 0, "numbers of tokens, for example [1024,4096]")
        require(self, "repeats", type(self.repeats) is int and self.repeats > 0, "a whole number, at least 1")

    @abstractmethod
    def puzzle(self, rng: random.Random) -> Puzzle:
        """Draw what is hidden and asked."""

    def cells(self) -> Iterator[tuple[int, float | None]]:
        """Return each (length, depth) of the grid; depth None: the needles are spread."""
        return ((length, None) for length in self.lengths)

    def haystack(self, longest: int) -> list[str]:
        """Return the sentences, which are repeated as often as needed."""
        return list(FILLER)

    def grade(self, text: str, answers: list[str]) -> float:
        """Return the share of the answers that the text names."""
        return len(set(answers) & set(re.findall(self.word, text))) / len(set(answers))

    def read(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Generate the haystacks; see :meth:`ag.evaluate.tasks.Task.read`."""
        sentences = self.haystack(max(self.lengths))
        sizes = [len(ids) for ids in tokenize(tokenizer, [" " + sentence for sentence in sentences])]
        for repeat, (length, depth) in itertools.product(range(self.repeats), self.cells()):
            where = "spread" if depth is None else f"{depth:g}"
            rng = random.Random(f"{self.seed}/{self.name}/{length}/{where}/{repeat}")
            puzzle = self.puzzle(rng)
            most = len(tokenize(tokenizer, [" " + self.join.join(puzzle.answers)])[0]) + SPARE
            if length + most > max_tokens:
                yield "too long"
                continue
            first = rng.randrange(len(sentences))
            order = itertools.islice(itertools.cycle(zip(sentences, sizes, strict=True)), first, None)
            fractions = [rng.random() for _ in puzzle.needles]
            fractions = sorted(fractions) if depth is None else [depth, *fractions[1:]]
            text, prompt = self._fit(tokenizer, puzzle, fractions, order, length)
            tags: dict[str, str | int | float] = {"length": length, "repeat": repeat}
            tags |= {} if depth is None else {"depth": depth}
            yield Haystack(f"{length}-{where}-{repeat}", prompt, text, puzzle.answers, most, tags)

    def answer(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, cache: EvictionCache, last: Tensor, sample: Haystack
    ) -> tuple[float, Tags]:
        """Generate greedily and grade."""
        tokens = greedy(model, cache, last, sample.most, end_tokens(model, tokenizer.eos_token_id))
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        return self.grade(text, sample.answers), {**sample.tags, "answer": text}

    def _fit(
        self,
        tokenizer: PreTrainedTokenizerBase,
        puzzle: Puzzle,
        fractions: list[float],
        order: Iterator[tuple[str, int]],
        length: int,
    ) -> tuple[str, list[int]]:
        """Return the text of at most ``length`` tokens with as many sentences as fit, and its tokens."""

        def build(hay: list[str]) -> tuple[str, list[int]]:
            lines = list(hay)
            for fraction, needle in sorted(zip(fractions, puzzle.needles, strict=True), reverse=True):
                lines.insert(round(fraction * len(hay)), needle)
            text = f"{puzzle.intro}\n\n{' '.join(lines)}\n\n{puzzle.question}"
            return text, start_tokens(tokenizer) + tokenize(tokenizer, [text])[0]

        room = length - len(build([])[1])
        hay: list[str] = []
        for sentence, size in order:
            room -= size
            if room < 0:
                break
            hay.append(sentence)
        while hay:
            text, ids = build(hay)
            if len(ids) <= length:
                return text, ids
            hay.pop()
        raise UserError(
            f"Task {self.name}: lengths={length} has no room for haystack, needles and question; give more."
        )
