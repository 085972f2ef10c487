"""Words to count: the most common ones of a list, the most frequent ones of a coded text."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass
from typing import Any, ClassVar

from ag.evaluate.tasks.generated import Generated, Variant
from ag.evaluate.tasks.questions import Puzzle
from ag.evaluate.tasks.words import draw_distinct, shuffled_words

SHORT = 4096  # samples with fewer tokens repeat their words less often
DOTS = "..."
COMMON = 10  # words that are asked
ALPHA = 2.0  # exponent of the zeta distribution of :func:`zeta_counts`


@dataclass(frozen=True)
class CommonWords(Generated):
    """A numbered list in which ten words stand 30 times and all others 3 times, after a solved example.

    In samples below 4,096 tokens they stand 6 times and once.
    """

    unit: ClassVar[str] = "lists"

    def identity(self) -> dict[str, Any]:
        """Name what was an option once, so that cells of earlier versions stay valid."""
        return super().identity() | {"common": COMMON}

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> Puzzle:
        """Draw the example and the words; ``size`` of them are uncommon; see :meth:`Generated.build`."""
        short = variant.length < SHORT
        example = self._puzzle(rng, (20 if short else 40) - COMMON, (3, 1) if short else (10, 3))
        puzzle = self._puzzle(rng, size, (6, 1) if short else (30, 3))
        return puzzle._replace(context=f"{example.context}{example.question}{example.right[0]}\n\n{puzzle.context}")

    def _puzzle(self, rng: random.Random, uncommon: int, times: tuple[int, int]) -> Puzzle:
        rng = random.Random(rng.random())  # so many draws as there are words must not change what follows
        words = shuffled_words(rng, COMMON + uncommon)
        asked, others = words[:COMMON], words[COMMON:]
        entries = asked * times[0] + others * times[1]
        rng.shuffle(entries)
        listed = " ".join(f"{i}. {word}" for i, word in enumerate(entries, start=1))
        intro = "In the following numbered list some words stand more often than others. Remember those that do."
        question = f"Question: Which {COMMON} words stand most often in the list?"
        lead = f"Answer: The {COMMON} words that stand most often in the list are:"
        right = " " + " ".join(f"{i}. {word}" for i, word in enumerate(asked, start=1))
        return Puzzle(f"{intro}\n{listed}", f"\n{question}\n{lead}", asked, [right])


@dataclass(frozen=True)
class FrequentWords(Generated):
    """Coded words with the frequencies of a zeta distribution; the three most frequent after the dots are asked."""

    unit: ClassVar[str] = "coded texts"
    least: ClassVar[int] = 56  # from here on the fourth rank stands more often than the fifth

    def identity(self) -> dict[str, Any]:
        """Name what was an option once, so that cells of earlier versions stay valid."""
        return super().identity() | {"alpha": ALPHA}

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> Puzzle:
        """Draw the words, and give each its share of ``size``; see :meth:`Generated.build`."""
        vocabulary = max(4, (variant.length - (self.generate or 0)) // 50)
        words = draw_distinct(lambda: "".join(rng.choices(string.ascii_lowercase, k=6)), vocabulary - 1)
        counts = zeta_counts(size, vocabulary)
        text = [word for word, count in zip([DOTS, *words], counts, strict=True) for _ in range(count)]
        rng.shuffle(text)
        intro = "Read the following coded text and keep track of how often each coded word stands in it."
        question = "Question: Which are the three most frequent coded words in the text, the dots left out?"
        lead = "Answer: The three most frequent coded words are:"
        return Puzzle(
            f"{intro}\n\n{' '.join(text)}", f"\n\n{question}\n{lead}", words[:3], [" " + ", ".join(words[:3])]
        )


def zeta_counts(total: int, ranks: int) -> list[int]:
    """Return floor(total k^-2 / zeta(2)), where zeta(2) is pi^2 / 6, for the ranks k = 1, 2, ..."""
    return [math.floor(6 * total / (math.pi * k) ** 2) for k in range(1, ranks + 1)]
