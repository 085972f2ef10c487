"""Needles in haystacks: facts hidden in filler, in real text or among others of their kind."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ag.errors import require
from ag.evaluate.tasks.base import require_whole
from ag.evaluate.tasks.generated import Haystack, Variant, hide, join, places, stretch
from ag.evaluate.tasks.questions import Puzzle
from ag.evaluate.tasks.words import NOUNS, draw_distinct, number, uuid4, word_key

KEYS, VALUES = ("noun", "word", "uuid"), ("number", "uuid")
PATTERNS = {"number": r"\d+", "uuid": r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"}


@dataclass(frozen=True)
class Needles(Haystack):
    """Keys with secret values, of which some are asked; the score is the share of the asked values that is named.

    Attributes:
        haystack: ``noise``: a filler of five sentences; ``text``: real text; ``needles``: facts about other keys.
        keys: how many keys have values in the haystack, that of the question among them.
        values: values of each key.
        queries: how many of the keys are asked.
        key: what keys are: a ``noun``, a ``word`` (adjective and noun) or a ``uuid``.
        value: what values are: a ``number`` or a ``uuid``.
        digits: digits of a number.
        depths: where the first needle stands: 0 is the start of the haystack, 1 its end; None: anywhere.
        hint: say before the haystack what to look for.
    """

    haystack: str = "noise"
    keys: int = 1
    values: int = 1
    queries: int = 1
    key: str = "noun"
    value: str = "number"
    digits: int = 7
    depths: Sequence[float] | None = None
    hint: bool = True

    unit: ClassVar[str] = "haystacks"
    haystacks: ClassVar[tuple[str, ...]] = ("noise", "text", "needles")

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        for name, known in (("key", KEYS), ("value", VALUES)):
            require(self, name, getattr(self, name) in known, f"one of {', '.join(known)}")
        most = len(NOUNS) if self.key == "noun" else 10_000
        require(self, "keys", type(self.keys) is int and 0 < self.keys <= most, f"1 to {most}")
        require_whole(self, "values")
        require(self, "queries", type(self.queries) is int and 0 < self.queries <= self.keys, f"1 to keys={self.keys}")
        require(self, "digits", type(self.digits) is int and 3 <= self.digits <= 18, "3 to 18")
        if self.depths is not None:
            inside = all(type(x) in (int, float) and 0 <= x <= 1 for x in self.depths) and len(self.depths) > 0
            require(self, "depths", inside, "shares between 0 and 1, for example [0,0.5,1]")

    def cells(self) -> Iterator[tuple[int, float | None]]:
        """Return each (length, depth)."""
        return itertools.product(self.lengths, [None] if self.depths is None else self.depths)

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> Puzzle:
        """Draw keys, values and places, then the hay; see :meth:`Generated.build`."""
        keys = draw_distinct(lambda: self._key(rng), self.keys)
        values = draw_distinct(lambda: self._value(rng), self.keys * self.values)
        owned = [values[i * self.values : (i + 1) * self.values] for i in range(self.keys)]
        needles = [self._line(key, value) for key, mine in zip(keys, owned, strict=True) for value in mine]
        fractions = self._fractions(rng, variant.depth, len(needles))
        asked = keys[: self.queries]
        references = [value for mine in owned[: self.queries] for value in mine]
        hay = self._hay(rng, material, size, set(keys))
        context = join(hide(hay, needles, fractions))
        intro = f"{self.intro()}\n\n" if self.hint else ""
        return Puzzle(intro + context, f"\n\n{self.ask(asked)}", references, [" " + ", ".join(references)])

    def needle(self, key: str, value: str) -> str:
        """Return the sentence that says a value of a key."""
        if self.values == 1:
            return f"The secret {self._noun} of the {key} is {value}."
        return f"One of the secret {self._noun}s of the {key} is {value}."

    def intro(self) -> str:
        """Return what comes before the haystack."""
        if self.keys * self.values == 1 and self.haystack != "needles":
            return f"Somewhere in the following text a secret {self._noun} is hidden. Remember it."
        return f"Somewhere in the following text several secret {self._noun}s are hidden. Remember them."

    def ask(self, keys: Sequence[str]) -> str:
        """Return the question, with the beginning of the answer."""
        names = [f"the {key}" for key in keys]
        owners = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        if len(keys) * self.values == 1:
            subject = f"secret {self._noun} of {owners}"
            return f"Question: What is the {subject}?\nAnswer: The {subject} is"
        subject = f"secret {self._noun}s of {owners}"
        many = f"all {self.values} " if self.values > 1 else "the "
        return f"Question: What are {many}{subject}?\nAnswer: The {subject} are"

    @property
    def _noun(self) -> str:
        return "number" if self.value == "number" else "code"

    def _line(self, key: str, value: str) -> str:
        return self.needle(key, value) + ("\n" if self.haystack == "needles" else "")

    def _key(self, rng: random.Random) -> str:
        return rng.choice(NOUNS) if self.key == "noun" else word_key(rng) if self.key == "word" else uuid4(rng)

    def _value(self, rng: random.Random) -> str:
        return number(rng, self.digits) if self.value == "number" else uuid4(rng)

    def _fractions(self, rng: random.Random, depth: float | None, many: int) -> list[float]:
        """Return a place for each needle; those in a text are even ones."""
        if self.haystack == "text" and depth is None:
            return places(rng, many)
        fractions = [rng.random() for _ in range(many)]
        return fractions if depth is None else [depth, *fractions[1:]]

    def _hay(self, rng: random.Random, material: Any, size: int, taken: set[str]) -> list[str]:
        if self.haystack != "needles":
            return stretch(rng, material, size)
        found: list[str] = []
        while len(found) < size:
            if (key := self._key(rng)) not in taken:
                found.append(self._line(key, self._value(rng)))
        return found


@dataclass(frozen=True)
class OneNeedle(Needles):
    """One value of one key is asked; the first one that is named must be it."""

    metric: ClassVar[str] = "exact match"

    def __post_init__(self) -> None:
        """Check that one is asked."""
        super().__post_init__()
        require(self, "queries", self.queries == 1, "1, because this task asks for one number")
        require(self, "values", self.values == 1, "1, because this task asks for one number")

    def grade(self, text: str, sample: Any) -> float:
        """Return 1.0 where the first value in the text is the right one."""
        return float(re.findall(PATTERNS[self.value], text)[:1] == sample.references)


@dataclass(frozen=True)
class ExactNeedle(OneNeedle):
    """The same without generating: right where each token of the answer is the likeliest one.

    So many samples can be run in the time that generating takes for a few, and the score is that of greedy decoding up
    to what follows the answer.
    """

    generates: ClassVar[bool] = False


@dataclass(frozen=True)
class Passkey(OneNeedle):
    """One pass key, said twice in one sentence."""

    def needle(self, key: str, value: str) -> str:
        """Return the sentence."""
        return f"The pass key is {value}. Remember it: {value} is the pass key."

    def intro(self) -> str:
        """Return what comes before the haystack."""
        return "Important information is hidden in a lot of irrelevant text. Find it and remember it."

    def ask(self, keys: Sequence[str]) -> str:
        """Return the question, with the beginning of the answer."""
        return "Question: What is the pass key?\nAnswer: The pass key is"
