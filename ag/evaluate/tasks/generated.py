"""Generated questions of any length: a context grows by units until it has as many tokens as it may.

In the manner of RULER (https://arxiv.org/abs/2404.06654), whose definitions they follow; the wording is our own. A
sample depends on the task's options, the seed, the length, its number and the tokenizer only.
"""

from __future__ import annotations

import itertools
import random
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from transformers import PreTrainedTokenizerBase

from ag.data.collate import start_tokens, tokenize, tokenize_after
from ag.errors import UserError, require
from ag.evaluate.tasks.base import LeftOut, Sample, require_whole
from ag.evaluate.tasks.held_out import HeldOut
from ag.evaluate.tasks.questions import SPARE, Puzzle, QuestionTask, share_named

NOISE = (
    "The street is quiet this morning.",
    "A cat sleeps on the warm wall.",
    "The wind comes from the sea.",
    "Somebody opens a window and closes it again.",
    "Nothing else happens.",
)
BOOKS, LETTERS = 32, 400_000  # of texts: at most so many, and so many characters of each
PROBE = 16  # units by which the size of one is estimated
DEPTHS = 40  # even places in a text, of which needles take different ones


class Variant(NamedTuple):
    """Where a sample stands in the grid."""

    length: int  # tokens
    depth: float | None  # of the needle, 0 to 1; None: anywhere
    repeat: int  # number of the sample among those alike, from 0

    @property
    def where(self) -> str:
        """The depth in words."""
        return "spread" if self.depth is None else f"{self.depth:g}"


@dataclass(frozen=True)
class Generated(QuestionTask):
    """What all generated tasks share.

    Attributes:
        lengths: tokens of context and question, reached up to a unit (a sentence, a word, a document).
        repeats: samples of each length (and depth); ``limit`` cuts the last repeats.
        seed: seed of the generator.
        generate: tokens of the answer, which then count in the length, as in RULER; None: as many as the right answer
            has and 8 more, beside the length.
    """

    lengths: Sequence[int] = (1024, 2048, 4096)
    repeats: int = 5
    seed: int = 0
    generate: int | None = None

    metric: ClassVar[str] = "recall"
    unit: ClassVar[str] = "contexts"
    #: Units that the shortest context has.
    least: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        require_whole(self, "lengths", "repeats", "generate")

    @property
    def series(self) -> str:
        """What samples are drawn for: tasks of one series have the same ones."""
        return self.name

    @abstractmethod
    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> Puzzle:
        """Return the sample whose context has ``size`` units.

        Args:
            rng: random numbers of this sample: the same for every size, as what is asked is drawn before what fills it.
            material: what :meth:`material` gave.
            variant: where the sample stands.
            size: how many units.
        """

    def material(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Return what all samples are made of."""
        return None

    def most_units(self, material: Any, variant: Variant) -> int | None:
        """Return how many units there are for a sample; None: any number."""
        return None

    def cells(self) -> Iterator[tuple[int, float | None]]:
        """Return each (length, depth) of the grid."""
        return ((length, None) for length in self.lengths)

    def grade(self, text: str, sample: Any) -> float:
        """Return the share of the references that the text names."""
        return share_named(text, sample.references)

    def read(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Generate the samples; see :meth:`ag.evaluate.tasks.Task.read`."""
        material = self.material(tokenizer)
        for repeat, (length, depth) in itertools.product(range(self.repeats), self.cells()):
            variant = Variant(length, depth, repeat)
            fitted = self._fit(tokenizer, material, variant, max_tokens)
            if fitted is None:
                yield "too long"
                continue
            tags: dict[str, str | int | float] = {"length": length, "repeat": repeat}
            tags |= {} if depth is None else {"depth": depth}
            asked = self.asked(tokenizer, f"{length}-{variant.where}-{repeat}", fitted, tags, self.generate)
            fits = len(asked.prompt) + len(asked.question) + asked.most <= max_tokens
            yield asked if fits else "too long"

    def _fit(
        self, tokenizer: PreTrainedTokenizerBase, material: Any, variant: Variant, max_tokens: int
    ) -> Puzzle | None:
        """Return the largest sample of a length, or None where it does not fit the model with its answer."""

        def build(size: int) -> Puzzle:
            rng = random.Random(f"{self.seed}/{self.series}/{variant.length}/{variant.where}/{variant.repeat}")
            return self.build(rng, material, variant, size)

        def tokens(size: int) -> int:
            puzzle = build(size)
            return len(start_tokens(tokenizer)) + len(tokenize(tokenizer, [puzzle.context + puzzle.question])[0])

        answer = self.generate
        if answer is None:
            answer = max(map(len, tokenize_after(tokenizer, build(self.least).right))) + SPARE
        if variant.length + (answer if self.generate is None else 0) > max_tokens:
            return None
        room = variant.length - (self.generate or 0)
        size = largest(tokens, room, self.least, self.most_units(material, variant))
        if size is None:
            beside = f" beside {self.generate} tokens of answer" if self.generate else ""
            raise UserError(
                f"Task {self.name}: lengths={variant.length} has no room for context and question{beside}: the "
                f"shortest has {tokens(self.least)} tokens; give more."
            )
        return build(size)


@dataclass(frozen=True)
class Haystack(Generated):
    """What tasks share that hide something in a text.

    Attributes:
        haystack: ``text``: real text; ``noise``: a filler of five sentences.
        data: where texts come from: hub id, or folder under ``root``; None: PG-19 on the hub, ``pg19_style`` in a root.
        text_field: the field that holds a text.
    """

    haystack: str = "text"
    data: str | None = None
    text_field: str = "text"

    haystacks: ClassVar[tuple[str, ...]] = ("text", "noise")

    def __post_init__(self) -> None:
        """Check what the haystack is."""
        super().__post_init__()
        require(self, "haystack", self.haystack in self.haystacks, f"one of {', '.join(self.haystacks)}")

    def material(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Read the texts, where they are the haystack."""
        return sentences(self.name, self.root, self.data, self.text_field) if self.haystack == "text" else None


def largest(tokens: Callable[[int], int], room: int, low: int, high: int | None = None) -> int | None:
    """Return the largest size from ``low`` to ``high`` whose tokens fit, None where none does.

    Sizes are tried where the tokens of the last ones suggest it, and then halfway.
    """
    at_low = tokens(low)
    if at_low > room:
        return None
    over = None if high is None else high + 1  # the smallest size that is known not to do
    step, tried = PROBE, 0
    while over is None or over - low > 1:
        size = low + step
        if over is not None:
            size = min(size, over - 1) if tried < PROBE else (low + over) // 2
        count = tokens(size)
        per_unit = max((count - at_low) / (size - low), 1e-9)
        if count <= room:
            low, at_low = size, count
        else:
            over = size
        step = max(1, min(round((room - at_low) / per_unit), 8 * max(step, PROBE)))
        tried += 1
    return low


def sentences(task: str, root: str | None, data: str | None, field: str) -> list[list[str]]:
    """Return the sentences of each text: of PG-19 on the hub, of ``pg19_style`` in a root, or of ``data``."""
    hub, folder = data or "emozilla/pg19-test", data or "pg19_style"
    texts = HeldOut(task, root, hub, folder, ("test", "validation")).texts(field)
    found = []
    for text in itertools.islice(texts, BOOKS):
        parts = re.split(r"(?<=[.!?])\s+", " ".join(text[:LETTERS].split()))
        found.append(parts[:-1] if len(text) > LETTERS else parts)
    found = [parts for parts in found if any(parts)]
    if not found:
        raise UserError(f"Task {task}: {root or hub} has no text to hide a needle in.")
    return found


def stretch(rng: random.Random, texts: Sequence[Sequence[str]] | None, many: int) -> list[str]:
    """Return so many sentences from a random place of a random text on; of no texts the filler."""
    if texts is None:
        return noise(many)
    text = rng.choice(texts)
    first = rng.randrange(len(text))
    return [text[(first + i) % len(text)] for i in range(many)]


def places(rng: random.Random, many: int) -> list[float]:
    """Return fractions of a text: different ones out of 40 even ones, as far as these go."""
    if many > DEPTHS:
        return [rng.random() for _ in range(many)]
    return [place / (DEPTHS - 1) for place in rng.sample(range(DEPTHS), many)]


def noise(many: int) -> list[str]:
    """Return the first sentences of the filler, repeated; each round of it is a line."""
    ends = ("",) * (len(NOISE) - 1) + ("\n",)
    return [NOISE[i % len(NOISE)] + ends[i % len(NOISE)] for i in range(many)]


def join(pieces: Sequence[str]) -> str:
    """Put pieces behind each other, with a space between those that no line break parts."""
    return "".join(piece if piece.endswith("\n") else piece + " " for piece in pieces).rstrip()


def interleave(rng: random.Random, chains: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of all chains in a random order, in which those of a chain keep theirs."""
    turns = [i for i, chain in enumerate(chains) for _ in chain]
    rng.shuffle(turns)
    left = [iter(chain) for chain in chains]
    return [next(left[i]) for i in turns]


def hide(hay: Sequence[str], needles: Sequence[str], fractions: Sequence[float]) -> list[str]:
    """Return the hay with each needle at its fraction of it."""
    pieces = list(hay)
    for fraction, needle in sorted(zip(fractions, needles, strict=True), reverse=True):
        pieces.insert(round(fraction * len(hay)), needle)
    return pieces
