"""Questions about contexts that are generated at any length: RULER's thirteen tasks, needles, and copying.

A context grows by units (sentences, words, documents) until it has as many tokens as it may. The definitions follow
RULER (https://arxiv.org/abs/2404.06654); the wording is our own. A sample depends on the task's options, the seed, the
length, its number and the tokenizer only.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import string
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from transformers import PreTrainedTokenizerBase

from ag.data.collate import start_tokens, tokenize, tokenize_after
from ag.data.sources import DataError, Record, check_fields
from ag.errors import UserError, require
from ag.evaluate.tasks.base import LeftOut, Sample, Tags, require_whole
from ag.evaluate.tasks.held_out import held_out, held_out_texts
from ag.evaluate.tasks.questions import SPARE, Puzzle, QuestionTask, share_named

NOISE = (
    "The street is quiet this morning.",
    "A cat sleeps on the warm wall.",
    "The wind comes from the sea.",
    "Somebody opens a window and closes it again.",
    "Nothing else happens.",
)
BOOKS, LETTERS = 32, 400_000  # texts that haystacks are cut from, and characters that are read of each
PROBE = 16  # units by which the size of one is estimated
DEPTHS = 40  # even places in a text, of which needles take different ones
EXAMPLE = 500  # tokens of the solved example of variables; of short samples a quarter
SHORT = 4096  # lists of common words with fewer tokens repeat their words less often
COMMON = 10  # common words that are asked
DOTS = "..."  # the most frequent "word" of a coded text, which is not asked
SOURCES = {"qa_1": ("rajpurkar/squad_v2", "squad_v2", None), "qa_2": ("hotpotqa/hotpot_qa", "hotpot_qa", "distractor")}
ONLY = "Answer the question based on the given documents. Give only the answer, in a few words."


class Variant(NamedTuple):
    """Where a sample stands in the grid."""

    length: int  # tokens
    depth: float | None  # of the needle, 0 to 1; None means anywhere
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
        generate: tokens of the answer, which then count in the length, as in RULER; None means as many as the right
            answer has and 8 more, beside the length.
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
        """Return how many units there are for a sample; None means any number."""
        return None

    def cells(self) -> Iterator[tuple[int, float | None]]:
        """Return each (length, depth) of the grid."""
        return ((length, None) for length in self.lengths)

    def grade(self, text: str, sample: Sample) -> float:
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
            tags: Tags = {"length": length, "repeat": repeat} | ({} if depth is None else {"depth": depth})
            asked = self.asked(tokenizer, f"{length}-{variant.where}-{repeat}", fitted, tags, self.generate)
            yield asked if asked.tokens <= max_tokens else "too long"

    def _fit(
        self, tokenizer: PreTrainedTokenizerBase, material: Any, variant: Variant, max_tokens: int
    ) -> Puzzle | None:
        """Return the largest sample of a length; None means that the length does not fit the model with its answer."""

        def build(size: int) -> Puzzle:
            rng = random.Random(f"{self.seed}/{self.series}/{variant.length}/{variant.where}/{variant.repeat}")
            return self.build(rng, material, variant, size)

        def tokens(size: int) -> int:
            puzzle = build(size)
            return len(start_tokens(tokenizer)) + len(tokenize(tokenizer, [puzzle.context + puzzle.question])[0])

        beside = 0
        if self.generate is None:
            beside = max(map(len, tokenize_after(tokenizer, build(self.least).right))) + SPARE
        if variant.length + beside > max_tokens:
            return None
        room = variant.length - (self.generate or 0)
        size = largest(tokens, room, self.least, self.most_units(material, variant))
        if size is None:
            answer = f" beside {self.generate} tokens of answer" if self.generate else ""
            raise UserError(
                f"Task {self.name}: lengths={variant.length} has no room for context and question{answer}: the "
                f"shortest has {tokens(self.least)} tokens; give more."
            )
        return build(size)


@dataclass(frozen=True)
class Haystack(Generated):
    """What tasks share that hide something in a text.

    Attributes:
        haystack: ``text``: real text; ``noise``: a filler of five sentences.
        data: where texts come from: hub id, or folder under ``root``; None means PG-19 on the hub, ``pg19_style`` in a
            root.
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
        """Read the sentences of each text, where texts are the haystack; None means the filler."""
        if self.haystack != "text":
            return None
        rows = held_out(self, self.data or "emozilla/pg19-test", self.data or "pg19_style", ("test", "validation"))
        found = []
        for text in itertools.islice(held_out_texts(rows, self.text_field), BOOKS):
            parts = re.split(r"(?<=[.!?])\s+", " ".join(text[:LETTERS].split()))
            found.append(parts[:-1] if len(text) > LETTERS else parts)
        found = [parts for parts in found if any(parts)]
        if not found:
            raise UserError(f"Task {self.name}: {rows[1]} has no text to hide a needle in.")
        return found


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
        depths: where the first needle stands: 0 is the start of the haystack, 1 its end; None means anywhere.
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
        require(self, "key", self.key in KEYS, f"one of {', '.join(KEYS)}")
        require(self, "value", self.value in VALUES, f"one of {', '.join(VALUES)}")
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
        keys = draw_distinct(lambda: KEYS[self.key](rng), self.keys)
        values = draw_distinct(lambda: VALUES[self.value](rng, self.digits), self.keys * self.values)
        owned = [values[i * self.values : (i + 1) * self.values] for i in range(self.keys)]
        end = "\n" if self.haystack == "needles" else ""
        needles = [self.needle(key, value) + end for key, mine in zip(keys, owned, strict=True) for value in mine]
        spread = self.haystack == "text" and variant.depth is None
        fractions = places(rng, len(needles)) if spread else [rng.random() for _ in needles]
        if variant.depth is not None:
            fractions[0] = variant.depth
        hay, taken = stretch(rng, material, size) if self.haystack != "needles" else [], set(keys)
        while len(hay) < size:
            if (key := KEYS[self.key](rng)) not in taken:
                hay.append(self.needle(key, VALUES[self.value](rng, self.digits)) + end)
        intro = f"{self.intro()}\n\n" if self.hint else ""
        references = [value for mine in owned[: self.queries] for value in mine]
        question = f"\n\n{self.ask(keys[: self.queries])}"
        return Puzzle(intro + join(hide(hay, needles, fractions)), question, references, [" " + ", ".join(references)])

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


@dataclass(frozen=True)
class OneNeedle(Needles):
    """One value of one key is asked; the first one that is named must be it."""

    metric: ClassVar[str] = "exact match"

    def __post_init__(self) -> None:
        """Check that one is asked."""
        super().__post_init__()
        require(self, "queries", self.queries == 1, "1, because this task asks for one number")
        require(self, "values", self.values == 1, "1, because this task asks for one number")

    def grade(self, text: str, sample: Sample) -> float:
        """Return 1.0 where the first value in the text is the right one."""
        pattern = r"\d+" if self.value == "number" else r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
        return float(re.findall(pattern, text)[:1] == sample.references)


@dataclass(frozen=True)
class ExactNeedle(OneNeedle):
    """The same without generating: right where each token of the answer is the likeliest one.

    The score is that of greedy decoding up to what follows the answer, in a small part of the time.
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
            return len(tokenize(tokenizer, [solved(self._puzzle(random.Random(0), 3, size))])[0])

        return {n: largest(tokens, min(EXAMPLE, n // 4), 0) or 0 for n in self.lengths}

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> Puzzle:
        """Draw the example, the chains and their places; see :meth:`Generated.build`."""
        before = f"{solved(self._puzzle(rng, 3, material[variant.length]))}\n\n" if self.example else ""
        puzzle = self._puzzle(rng, 5, size)
        return puzzle._replace(context=before + puzzle.context)

    def _puzzle(self, rng: random.Random, letters: int, size: int) -> Puzzle:
        length = self.hops + 1
        values = draw_distinct(lambda: number(rng, 5), self.chains)
        names = draw_distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)), self.chains * length)
        chains = [names[i * length : (i + 1) * length] for i in range(self.chains)]
        needles = interleave(rng, [assignments(*one) for one in zip(chains, values, strict=True)])
        fractions = sorted(rng.random() for _ in needles)
        intro = "The following text sets variables to numbers and to each other. Keep track of them."
        asked = f"Question: Which {length} variables have the value {values[0]}?"
        lead = f"Answer: {length} variables have the value {values[0]}, they are:"
        context = f"{intro}\n\n{join(hide(noise(size), needles, fractions))}"
        return Puzzle(context, f"\n\n{asked}\n{lead}", chains[0], [" " + ", ".join(chains[0])])


@dataclass(frozen=True)
class CommonWords(Generated):
    """A numbered list in which ten words stand 30 times and all others 3 times, after a solved example.

    In samples below 4,096 tokens they stand 6 times and once.
    """

    unit: ClassVar[str] = "lists"

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> Puzzle:
        """Draw the example and the words; ``size`` of them are uncommon; see :meth:`Generated.build`."""
        short = variant.length < SHORT
        example = self._puzzle(rng, (20 if short else 40) - COMMON, (3, 1) if short else (10, 3))
        puzzle = self._puzzle(rng, size, (6, 1) if short else (30, 3))
        return puzzle._replace(context=f"{solved(example)}\n\n{puzzle.context}")

    def _puzzle(self, rng: random.Random, uncommon: int, times: tuple[int, int]) -> Puzzle:
        rng = random.Random(rng.random())  # how many draws words need must not change what follows
        words = shuffled_words(rng, COMMON + uncommon)
        asked, others = words[:COMMON], words[COMMON:]
        entries = asked * times[0] + others * times[1]
        rng.shuffle(entries)
        intro = "In the following numbered list some words stand more often than others. Remember those that do."
        question = f"Question: Which {COMMON} words stand most often in the list?"
        lead = f"Answer: The {COMMON} words that stand most often in the list are:"
        return Puzzle(f"{intro}\n{numbered(entries)}", f"\n{question}\n{lead}", asked, [" " + numbered(asked)])


@dataclass(frozen=True)
class FrequentWords(Generated):
    """Coded words with the frequencies of a zeta distribution; the three most frequent after the dots are asked."""

    unit: ClassVar[str] = "coded texts"
    least: ClassVar[int] = 56  # from here on the fourth rank stands more often than the fifth

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
        right = " " + ", ".join(words[:3])
        return Puzzle(f"{intro}\n\n{' '.join(text)}", f"\n\n{question}\n{lead}", words[:3], [right])


class Item(NamedTuple):
    """A question about some of the documents."""

    question: str
    answers: list[str]  # all annotated ones
    gold: list[int]  # the documents that it is about, by index
    near: list[int]  # documents of the same article, which come before others


class Corpus(NamedTuple):
    """All documents and the questions about them."""

    documents: list[str]
    items: list[Item]


@dataclass(frozen=True)
class DocumentQA(Generated):
    """A question whose documents stand among as many others as fit; right where an annotated answer is named."""

    unit: ClassVar[str] = "questions"
    least: ClassVar[int] = 0

    def material(self, tokenizer: PreTrainedTokenizerBase) -> Corpus:
        """Read all questions and documents."""
        hub, folder, subset = SOURCES[self.name]
        _, where, rows = held_out(self, hub, folder, ("validation",), subset)
        corpus = (squad if self.name == "qa_1" else hotpot)(rows, where)
        if not corpus.items:
            raise UserError(f"Task {self.name}: {where} has no question with an answer.")
        return corpus

    def most_units(self, material: Any, variant: Variant) -> int:
        """Return how many documents are not the question's own."""
        return len(material.documents) - len(self._item(material, variant).gold)

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> Puzzle:
        """Draw ``size`` other documents and shuffle all; see :meth:`Generated.build`."""
        item = self._item(material, variant)
        near = list(item.near)
        rng.shuffle(near)
        draws, chosen = random.Random(rng.random()), dict.fromkeys(item.gold + near[:size])
        while len(chosen) < len(item.gold) + size:
            chosen[draws.randrange(len(material.documents))] = None
        order = list(chosen)
        rng.shuffle(order)
        listed = [f"Document {i}:\n{material.documents[index]}" for i, index in enumerate(order, start=1)]
        context = f"{ONLY}\n\nThe following are given documents.\n\n" + "\n\n".join(listed)
        right = [f" {answer}" for answer in item.answers]
        return Puzzle(context, f"\n\n{ONLY}\n\nQuestion: {item.question}\nAnswer:", item.answers, right)

    def grade(self, text: str, sample: Sample) -> float:
        """Return 1.0 where an answer is named: RULER's ``string_match_part``."""
        return float(any(reference.lower() in text.lower() for reference in sample.references))

    def _item(self, material: Corpus, variant: Variant) -> Item:
        return material.items[(self.seed + variant.repeat) % len(material.items)]


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
        for repeat, pairs in itertools.product(range(self.repeats), self.pairs):
            rng = random.Random(f"{self.seed}/{self.name}/{pairs}/{repeat}")
            names = draw_distinct(lambda rng=rng: uuid4(rng), 2 * pairs)  # type: ignore[misc]
            entries = dict(zip(names[:pairs], names[pairs:], strict=True))
            key = rng.choice(names[:pairs])
            context = f"JSON data:\n{json.dumps(entries, indent=0)}"
            question = f'\n\nThe value of the key "{key}" in the JSON data is: "'
            puzzle = Puzzle(context, question, [entries[key]], [entries[key]])
            asked = self.asked(tokenizer, f"{pairs}-{repeat}", puzzle, {"pairs": pairs, "repeat": repeat})
            yield asked if asked.tokens <= max_tokens else "too long"

    def grade(self, text: str, sample: Sample) -> float:
        """Return 1.0 where the answer begins with the value."""
        return float(text.strip().startswith(sample.references[0]))


def squad(rows: Iterable[Record], where: str) -> Corpus:
    """Read SQuAD; questions without an answer are left out, their paragraphs stay."""
    documents: dict[str, int] = {}
    articles: dict[str, list[int]] = {}
    asked: list[tuple[str, list[str], int, str]] = []
    fields: dict[str, type | tuple[type, ...]] = {"title": str, "context": str, "question": str, "answers": dict}
    for row_number, row in enumerate(rows, start=1):
        check_fields(row, fields, f"{where} row {row_number}")
        index = documents.setdefault(row["context"], len(documents))
        if index not in articles.setdefault(row["title"], []):
            articles[row["title"]].append(index)
        answers = list(dict.fromkeys(row["answers"].get("text", [])))
        if answers:
            asked.append((row["question"], answers, index, row["title"]))
    items = [Item(q, answers, [i], [other for other in articles[t] if other != i]) for q, answers, i, t in asked]
    return Corpus(list(documents), items)


def hotpot(rows: Iterable[Record], where: str) -> Corpus:
    """Read HotpotQA with its distractors; all paragraphs of a question are its own."""
    documents: dict[str, int] = {}
    items = []
    for row_number, row in enumerate(rows, start=1):
        at = f"{where} row {row_number}"
        check_fields(row, {"question": str, "answer": str, "context": dict}, at)
        try:
            paired = list(zip(row["context"]["title"], row["context"]["sentences"], strict=True))
            texts = [f"{title}\n{''.join(sentences)}" for title, sentences in paired]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{at}: context has no titles with sentences, as on the hub: {error!r}") from error
        gold = [documents.setdefault(text, len(documents)) for text in texts]
        items.append(Item(row["question"], [row["answer"]], list(dict.fromkeys(gold)), []))
    return Corpus(list(documents), items)


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


def stretch(rng: random.Random, texts: Sequence[Sequence[str]] | None, many: int) -> list[str]:
    """Return ``many`` sentences from a random place of a random text on; those of the filler where texts are None."""
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


def assignments(chain: Sequence[str], value: str) -> list[str]:
    """Return the statements that hand a value on from variable to variable, each before the next one in the text."""
    later = [f"VAR {new} = VAR {old}." for old, new in itertools.pairwise(chain)]
    return [f"VAR {chain[0]} = {value}.", *later]


def solved(puzzle: Puzzle) -> str:
    """Return a puzzle with its answer, as an example."""
    return f"{puzzle.context}{puzzle.question}{puzzle.right[0]}"


def numbered(words: Sequence[str]) -> str:
    """Return words as the entries of a numbered list in one line."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


def zeta_counts(total: int, ranks: int) -> list[int]:
    """Return floor(total k^-2 / zeta(2)), where zeta(2) is pi^2 / 6, for the ranks k = 1, 2, ..."""
    return [math.floor(6 * total / (math.pi * k) ** 2) for k in range(1, ranks + 1)]


def draw_distinct(draw: Callable[[], str], many: int) -> list[str]:
    """Return the first ``many`` different texts that a function gives."""
    found: dict[str, None] = {}
    while len(found) < many:
        found[draw()] = None
    return list(found)


def number(rng: random.Random, digits: int) -> str:
    """Draw a number without leading zeros."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def uuid4(rng: random.Random) -> str:
    """Draw a UUID of version 4."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def shuffled_words(rng: random.Random, many: int) -> list[str]:
    """Return different words in random order; where nouns, adjectives and verbs run out, also two nouns in one."""
    words = list(dict.fromkeys((*NOUNS, *ADJECTIVES, *VERBS)))
    rng.shuffle(words)
    if many > len(words):
        pairs = list(itertools.permutations(NOUNS, 2))
        rng.shuffle(pairs)
        words += dict.fromkeys("".join(pair) for pair in pairs[: 2 * many])
    return words[:many]


# everyday English words, for keys that are drawn and lists that are counted
WORDS = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8")
ADJECTIVES, NOUNS, VERBS = (words.split() for words in WORDS.split("\n\n"))
#: What keys and values of needles may be, and how each is drawn.
KEYS: dict[str, Callable[[random.Random], str]] = {
    "noun": lambda rng: rng.choice(NOUNS),
    "word": lambda rng: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}",
    "uuid": uuid4,
}
VALUES: dict[str, Callable[[random.Random, int], str]] = {"number": number, "uuid": lambda rng, digits: uuid4(rng)}
