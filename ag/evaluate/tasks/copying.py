"""Copying from a context: the value of a key in a JSON object, and a whole text word for word."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ag.evaluate.tasks.base import LeftOut, Sample, require_whole
from ag.evaluate.tasks.generated import Generated, Variant, join, sentences, stretch
from ag.evaluate.tasks.questions import Puzzle, QuestionTask
from ag.evaluate.tasks.words import draw_distinct, uuid4


@dataclass(frozen=True)
class KeyValues(QuestionTask):
    """A JSON object of UUIDs, of which one is asked by its key.

    Attributes:
        pairs: how many entries the object has.
        repeats: samples of each number of entries; ``limit`` cuts the last repeats.
        seed: seed of the generator.
    """

    pairs: Sequence[int] = (8, 16, 32, 64)
    repeats: int = 20
    seed: int = 0

    metric: ClassVar[str] = "exact match"
    unit: ClassVar[str] = "objects"

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        require_whole(self, "pairs", "repeats")

    def read(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Generate the objects; see :meth:`ag.evaluate.tasks.Task.read`."""
        for repeat in range(self.repeats):
            for pairs in self.pairs:
                rng = random.Random(f"{self.seed}/{self.name}/{pairs}/{repeat}")
                names = draw_distinct(lambda rng=rng: uuid4(rng), 2 * pairs)  # type: ignore[misc]
                entries = dict(zip(names[:pairs], names[pairs:], strict=True))
                key = rng.choice(names[:pairs])
                context = f"JSON data:\n{json.dumps(entries, indent=0)}"
                question = f'\n\nThe value of the key "{key}" in the JSON data is: "'
                puzzle = Puzzle(context, question, [entries[key]], [entries[key]])
                asked = self.asked(tokenizer, f"{pairs}-{repeat}", puzzle, {"pairs": pairs, "repeat": repeat})
                fits = len(asked.prompt) + len(asked.question) + asked.most <= max_tokens
                yield asked if fits else "too long"

    def grade(self, text: str, sample: Any) -> float:
        """Return 1.0 where the answer begins with the value."""
        return float(text.strip().startswith(sample.references[0]))


@dataclass(frozen=True)
class RepeatText(Generated):
    """Real text is to be repeated word for word; the score is the share of its tokens that are the likeliest.

    Attributes:
        data: hub id, or folder under ``root``; None: PG-19 on the hub, ``pg19_style`` in a root.
        text_field: the field that holds a text.
    """

    data: str | None = None
    text_field: str = "text"

    metric: ClassVar[str] = "token accuracy"
    unit: ClassVar[str] = "texts"
    generates: ClassVar[bool] = False

    def material(self, tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
        """Read the texts."""
        return sentences(self.name, self.root, self.data, self.text_field)

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> Puzzle:
        """Take ``size`` sentences of a text; see :meth:`Generated.build`."""
        context = join(stretch(rng, material, size))
        return Puzzle(context, "\n\nThe same text again, word for word:\n\n", [context], [context])

    def tally(self, likeliest: Tensor) -> float:
        """Return the share of the tokens that are the likeliest."""
        return float(likeliest.float().mean())

    def floor(self, samples: Sequence[Any]) -> float:
        """Return 0.5: a model that repeats nothing guesses about two of five tokens of a text."""
        return 0.5
