"""The kinds of needles; what they share is in :mod:`ag.evaluate.tasks.needle`."""

from __future__ import annotations

import itertools
import random
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ag.errors import UserError, require
from ag.evaluate.tasks.needle import Needles, Puzzle
from ag.evaluate.tasks.rows import HeldOut

KEYS = (
    *("anchor", "barrel", "candle", "dagger", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle"),
    *("ladder", "mirror", "needle", "orchard", "pencil", "quarry", "ribbon", "saddle", "timber", "umbrella", "valley"),
    *("wagon", "yacht", "zipper", "basket", "compass", "drum", "fountain", "lantern", "meadow", "pillow"),
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
        hub, folder = self.data or "emozilla/pg19-test", self.data or "pg19_style"
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
    join: ClassVar[str] = ", VAR "

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
        lead = f"Answer: {length} variables have the value {values[0]}, they are: VAR"
        return Puzzle(intro, needles, f"{asked}\n{lead}", chains[0])


def _numbers(rng: random.Random, many: int) -> list[str]:
    return _distinct(lambda: str(rng.randrange(10**6, 10**7)), many)


def _distinct(draw: Callable[[], str], many: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < many:
        found[draw()] = None
    return list(found)
