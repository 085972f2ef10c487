"""Variables that are set to numbers and to each other."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ag.data.collate import tokenize
from ag.evaluate.tasks.base import require_whole
from ag.evaluate.tasks.generated import Generated, Variant, hide, interleave, join, largest, noise
from ag.evaluate.tasks.questions import Puzzle
from ag.evaluate.tasks.words import draw_distinct, number

EXAMPLE = 500  # tokens of the solved example; of short samples a quarter


@dataclass(frozen=True)
class Variables(Generated):
    """Variables are set to a number or to each other; the score is the share named of those that hold the number.

    Attributes:
        chains: numbers that are handed on; one of them is asked.
        hops: how often each is handed on.
        example: a solved sample, with shorter names, comes first.
    """

    chains: int = 2
    hops: int = 3
    example: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        require_whole(self, "chains", "hops")

    def material(self, tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
        """Return for each length the sentences of filler in its example."""
        if not self.example:
            return {}

        def tokens(size: int) -> int:
            solved = self._solved(random.Random(0), size)
            return len(tokenize(tokenizer, [solved])[0])

        return {n: largest(tokens, min(EXAMPLE, n // 4), 0) or 0 for n in self.lengths}

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> Puzzle:
        """Draw the example, the chains and their places; see :meth:`Generated.build`."""
        before = f"{self._solved(rng, material[variant.length])}\n\n" if self.example else ""
        puzzle = self._puzzle(rng, 5, size)
        return puzzle._replace(context=before + puzzle.context)

    def _solved(self, rng: random.Random, size: int) -> str:
        puzzle = self._puzzle(rng, 3, size)
        return f"{puzzle.context}{puzzle.question}{puzzle.right[0]}"

    def _puzzle(self, rng: random.Random, letters: int, size: int) -> Puzzle:
        length = self.hops + 1
        values = draw_distinct(lambda: number(rng, 5), self.chains)
        names = draw_distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)), self.chains * length)
        chains = [names[i * length : (i + 1) * length] for i in range(self.chains)]
        needles = interleave(rng, [lines(chain, value) for chain, value in zip(chains, values, strict=True)])
        fractions = sorted(rng.random() for _ in needles)
        intro = "The following text sets variables to numbers and to each other. Keep track of them."
        asked = f"Question: Which {length} variables have the value {values[0]}?"
        lead = f"Answer: {length} variables have the value {values[0]}, they are:"
        context = f"{intro}\n\n{join(hide(noise(size), needles, fractions))}"
        return Puzzle(context, f"\n\n{asked}\n{lead}", chains[0], [" " + ", ".join(chains[0])])


def lines(chain: Sequence[str], value: str) -> list[str]:
    """Return the statements of a chain, each before the next one in the text."""
    later = [f"VAR {new} = VAR {old}." for old, new in itertools.pairwise(chain)]
    return [f"VAR {chain[0]} = {value}.", *later]
