"""Needles in haystacks, in the manner of RULER (https://arxiv.org/abs/2404.06654): generated, of any length.

A haystack is a short repeated filler or real text; needles are sentences put between its sentences. The model answers
greedily after the prompt was evicted. A sample depends on the options, its number and the tokenizer only.
"""

from __future__ import annotations

import itertools
import random
import re
import string
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ag.data.collate import start_tokens, tokenize
from ag.engine import EvictionCache
from ag.errors import UserError, require
from ag.evaluate.tasks.base import Loaded, PromptTask, Sample, Tags
from ag.evaluate.tasks.follow import end_tokens, greedy
from ag.evaluate.tasks.rows import HeldOut

FILLER = (
    "The street is quiet this morning.",
    "A cat sleeps on the warm wall.",
    "The wind comes from the sea.",
    "Somebody opens a window and closes it again.",
    "Nothing else happens.",
)
KEYS = (
    *("anchor", "barrel", "candle", "dagger", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle"),
    *("ladder", "mirror", "needle", "orchard", "pencil", "quarry", "ribbon", "saddle", "timber", "umbrella", "valley"),
    *("wagon", "yacht", "zipper", "basket", "compass", "drum", "fountain", "lantern", "meadow", "pillow"),
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
    word: ClassVar[str] = r"\d+"

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

    def load(self, tokenizer: PreTrainedTokenizerBase, limit: int | None, max_tokens: int) -> Loaded:
        """Generate the haystacks; see :meth:`ag.evaluate.tasks.Task.load`."""
        sentences = self.haystack(max(self.lengths))
        sizes = [len(ids) for ids in tokenize(tokenizer, [" " + sentence for sentence in sentences])]
        plan = itertools.islice(itertools.product(range(self.repeats), self.cells()), limit)
        samples, too_long = [], 0
        for repeat, (length, depth) in plan:
            rng = random.Random(f"{self.seed}/{self.name}/{length}/{depth}/{repeat}")
            puzzle = self.puzzle(rng)
            most = len(tokenize(tokenizer, [" " + ", ".join(puzzle.answers)])[0]) + SPARE
            if length + most > max_tokens:
                too_long += 1
                continue
            first = rng.randrange(len(sentences))
            order = itertools.islice(itertools.cycle(zip(sentences, sizes, strict=True)), first, None)
            fractions = sorted(rng.random() for _ in puzzle.needles)
            if depth is not None:
                fractions = [depth, *fractions[1:]]
            text, prompt = self._fit(tokenizer, puzzle, fractions, order, length)
            tags: dict[str, str | int | float] = {"length": length, "repeat": repeat}
            tags |= {} if depth is None else {"depth": depth}
            name = f"{length}-{'spread' if depth is None else f'{depth:g}'}-{repeat}"
            samples.append(Haystack(name, prompt, text, puzzle.answers, most, tags))
        return Loaded(samples, too_long=too_long)

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


@dataclass(frozen=True)
class OneNeedle(Needles):
    """A number hidden once at a depth; ``keys`` - 1 others, of other keys, are spread to distract.

    Attributes:
        depths: where the needle stands: 0 is the start of the haystack, 1 its end.
        keys: needles in the haystack, all told.
    """

    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    keys: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        inside = all(type(x) in (int, float) and 0 <= x <= 1 for x in self.depths) and len(self.depths) > 0
        require(self, "depths", inside, "shares between 0 and 1, for example [0,0.5,1]")
        require(self, "keys", type(self.keys) is int and 0 < self.keys <= len(KEYS), f"1 to {len(KEYS)}")

    def cells(self) -> Iterator[tuple[int, float | None]]:
        """Return each (length, depth)."""
        return itertools.product(self.lengths, self.depths)

    def puzzle(self, rng: random.Random) -> Puzzle:
        """Draw the keys and their numbers."""
        keys, values = rng.sample(KEYS, self.keys), _numbers(rng, self.keys)
        needles = [f"The secret number of the {key} is {value}." for key, value in zip(keys, values, strict=True)]
        intro = "Somewhere in the following text a secret number is hidden. Remember it."
        asked = f"Question: What is the secret number of the {keys[0]}?"
        return Puzzle(intro, needles, f"{asked}\nAnswer: The secret number of the {keys[0]} is", [values[0]])

    def grade(self, text: str, answers: list[str]) -> float:
        """Return 1.0 where the first number of the text is the right one."""
        return float(re.findall(self.word, text)[:1] == answers)


@dataclass(frozen=True)
class NeedleInText(OneNeedle):
    """The same in real text.

    Attributes:
        data: hub id, or folder under ``root``; None: PG-19 on the hub, ``pg19_style`` in a root.
        text_field: the field that holds a document.
    """

    data: str | None = None
    text_field: str = "text"

    def haystack(self, longest: int) -> list[str]:
        """Return the sentences of the first documents, some times as many as the longest sample needs."""
        hub, folder = self.data or "emozilla/pg19", self.data or "pg19_style"
        sentences: list[str] = []
        wanted = 40 * longest  # characters: some windows of text
        for text in HeldOut.of(self.name, self.root, hub, folder, ("test", "validation")).texts(self.text_field):
            found = re.split(r"(?<=[.!?])\s+", " ".join(text[:wanted].split()))
            sentences += found[:-1] if len(text) > wanted else found
            wanted -= len(text)
            if wanted <= 0:
                break
        if not sentences:
            raise UserError(f"Task {self.name}: {self.root or hub} has no text to hide a needle in.")
        return sentences


@dataclass(frozen=True)
class ManyValues(Needles):
    """One key has several numbers, spread over the haystack; the score is the share of them that is named.

    Attributes:
        values: how many.
    """

    values: int = 4

    metric: ClassVar[str] = "recall"

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        require(self, "values", type(self.values) is int and self.values > 0, "a whole number, at least 1")

    def puzzle(self, rng: random.Random) -> Puzzle:
        """Draw the key and its numbers."""
        key, values = rng.choice(KEYS), _numbers(rng, self.values)
        needles = [f"One of the secret numbers of the {key} is {value}." for value in values]
        intro = "Somewhere in the following text several secret numbers are hidden. Remember them."
        asked = f"Question: What are all {self.values} secret numbers of the {key}?"
        return Puzzle(intro, needles, f"{asked}\nAnswer: The secret numbers of the {key} are", values)


@dataclass(frozen=True)
class Variables(Needles):
    """Variables are set to a number or to each other; the score is the share named of those that hold the number.

    Attributes:
        chains: numbers that are handed on; one of them is asked.
        hops: how often each is handed on.
    """

    chains: int = 2
    hops: int = 3

    metric: ClassVar[str] = "recall"
    word: ClassVar[str] = r"[A-Z]{5}"

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        for name in ("chains", "hops"):
            require(self, name, type(value := getattr(self, name)) is int and value > 0, "a whole number, at least 1")

    def puzzle(self, rng: random.Random) -> Puzzle:
        """Draw the chains and mix them, each in its own order."""
        values, length = _numbers(rng, self.chains), self.hops + 1
        names = _distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=5)), self.chains * length)
        chains = [names[i * length : (i + 1) * length] for i in range(self.chains)]
        lines = [
            [f"VAR {chain[0]} = {value}.", *(f"VAR {new} = VAR {old}." for old, new in itertools.pairwise(chain))]
            for chain, value in zip(chains, values, strict=True)
        ]
        turns = [i for i in range(self.chains) for _ in range(length)]
        rng.shuffle(turns)
        needles = [lines[i].pop(0) for i in turns]
        intro = "The following text sets variables to numbers and to each other. Keep track of them."
        asked = f"Question: Which {length} variables have the value {values[0]}?"
        return Puzzle(intro, needles, f"{asked}\nAnswer: The variables with the value {values[0]} are", chains[0])


def _numbers(rng: random.Random, many: int) -> list[str]:
    return _distinct(lambda: str(rng.randrange(10**6, 10**7)), many)


def _distinct(draw: Callable[[], str], many: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < many:
        found[draw()] = None
    return list(found)
