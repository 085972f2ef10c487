"""Questions about contexts that are generated at any length: RULER's thirteen tasks, and needles.

A context is filled with units (sentences, words, documents) up to its length. The definitions follow RULER
(https://arxiv.org/abs/2404.06654); the wording is our own. A sample depends only on the task's options, the seed, the
length, its number and the tokenizer.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import re
import string
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field
from transformers import PreTrainedTokenizerBase as Tokenizer

from ag.data.sources import DataError, Record, check_fields
from ag.data.tokens import tokenize, tokenize_after, tokenize_prompt
from ag.errors import UserError, require
from ag.evaluate.tasks.base import GENERATED, LeftOut, PositiveInt, PositiveInts, Sample, Tags
from ag.evaluate.tasks.held_out import held_out, held_out_texts
from ag.evaluate.tasks.questions import EXTRA_ANSWER_TOKENS, QuestionTask, TextSample

NOISE = (
    "The street is quiet this morning.",
    "A cat sleeps on the warm wall.",
    "The wind comes from the sea.",
    "Somebody opens a window and closes it again.",
    "Nothing else happens.",
)
BOOKS, LETTERS = 32, 400_000  # number of texts for haystacks, and characters read of each
PROBE = 16  # units by which the first size exceeds the smallest, in the search for the largest
NUM_DEPTHS = 40  # number of evenly spaced places in a text; needles are put at some of them
EXAMPLE = 500  # tokens of the solved example of variables; at most a quarter of the length
SHORT = 4096  # lists of common words below this number of tokens repeat their words less often
COMMON = 10  # number of common words in an answer
DOTS = "..."  # the most frequent "word" of a coded text, which no answer has
SOURCES = {"qa_1": ("rajpurkar/squad_v2", "squad_v2", None), "qa_2": ("hotpotqa/hotpot_qa", "hotpot_qa", "distractor")}
Digits = Annotated[int, Field(ge=3, le=18)]
ONLY = "Answer the question based on the given documents. Give only the answer, in a few words."


class Variant(NamedTuple):
    """Length in tokens, depth of the needle (0 to 1; None: anywhere), and number within these, of a sample."""

    length: int
    depth: float | None
    repeat: int

    @property
    def location(self) -> str:
        """The depth in words."""
        return "spread" if self.depth is None else f"{self.depth:g}"


@dataclass(frozen=True)
class Generated(QuestionTask):
    """A task whose contexts are generated.

    An answer of ``generate`` tokens counts in the length, as in RULER. None: the answer has the tokens of the right one
    and 8 more, which do not count in the length.
    """

    lengths: PositiveInts = (1024, 2048, 4096)  # tokens of context and question; a sample lacks less than one unit
    repeats: PositiveInt = 5  # samples of each length (and depth); a limit cuts the last repeats
    seed: int = 0  # of the generator
    generate: PositiveInt | None = None  # tokens of the answer

    metric: ClassVar[str] = "recall"
    unit: ClassVar[str] = "contexts"
    min_units: ClassVar[int] = 1  # smallest number of units of a context

    @property
    def source(self) -> str:
        """Where the samples come from; see :attr:`Task.source`."""
        return super().source if self.reads_data else GENERATED

    @property
    def reads_data(self) -> bool:
        """Whether the contexts contain texts from a folder or the hub."""
        return False

    @property
    def series(self) -> str:
        """Name of the samples. Tasks with equal names have equal samples."""
        return self.name

    @abstractmethod
    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> TextSample:
        """Return the sample of a variant whose context has ``size`` units.

        ``rng`` has equal numbers for every size: the question is drawn before the filler. ``material`` is the result of
        :meth:`material`.
        """

    def material(self, tokenizer: Tokenizer) -> Any:
        """Return the data of all samples."""
        return None

    def max_units(self, material: Any, variant: Variant) -> int | None:
        """Return the largest number of units of a sample. None: any number."""
        return None

    def grade(self, text: str, sample: Sample) -> float:
        """Return the share of the references that a text contains: RULER's ``string_match_all``."""
        return fmean(_contains(text, reference) for reference in sample.references)

    def read(self, tokenizer: Tokenizer, max_tokens: int) -> Iterator[Sample | LeftOut]:
        """Generate the samples; see :meth:`ag.evaluate.tasks.Task.read`."""
        material, depths = self.material(tokenizer), getattr(self, "depths", None) or [None]
        for repeat, length, depth in itertools.product(range(self.repeats), self.lengths, depths):
            variant = Variant(length, depth, repeat)
            fitted = self._fit(tokenizer, material, variant, max_tokens)
            if fitted is None:
                yield "too long"
                continue
            tags: Tags = {"length": length, "repeat": repeat} | ({} if depth is None else {"depth": depth})
            name = f"{length}-{variant.location}-{repeat}"
            sample = self.tokenize_sample(tokenizer, name, fitted, tags, self.generate)
            used = len(sample.prompt) + len(sample.question) + sample.max_new_tokens
            yield sample if used <= max_tokens else "too long"

    def _fit(self, tokenizer: Tokenizer, material: Any, variant: Variant, max_tokens: int) -> TextSample | None:
        """Return the largest sample of a length. None: length and answer do not fit the model."""

        def build(size: int) -> TextSample:
            rng = random.Random(f"{self.seed}/{self.series}/{variant.length}/{variant.location}/{variant.repeat}")
            return self.build(rng, material, variant, size)

        def tokens(size: int) -> int:
            return len(tokenize_prompt(tokenizer, build(size).text))

        num_answer = 0
        if self.generate is None:
            num_answer = max(map(len, tokenize_after(tokenizer, build(self.min_units).answers))) + EXTRA_ANSWER_TOKENS
        if variant.length + num_answer > max_tokens:
            return None
        room = variant.length - (self.generate or 0)
        if (size := largest(tokens, room, self.min_units, self.max_units(material, variant))) is None:
            answer = f" beside {self.generate} tokens of answer" if self.generate else ""
            raise UserError(
                f"Task {self.name}: lengths={variant.length} has no room for context and question{answer}: the "
                f"shortest has {tokens(self.min_units)} tokens; give more."
            )
        return build(size)


@dataclass(frozen=True)
class Haystack(Generated):
    """A task that hides something in a text."""

    haystack: Literal["noise", "text", "needles"] = "text"  # noise: a filler of five sentences; text: real text
    data: str | None = None  # of the texts: hub id, or folder under root; None: PG-19 on the hub, pg19_style in a root
    text_field: str = "text"  # the field that holds a text

    @property
    def reads_data(self) -> bool:
        """Whether the contexts contain texts from a folder or the hub."""
        return self.haystack == "text"

    def material(self, tokenizer: Tokenizer) -> Any:
        """Return the sentences of each text. None: the filler."""
        if not self.reads_data:
            return None
        data = held_out(self, self.data or "emozilla/pg19-test", self.data or "pg19_style", ("test", "validation"))
        texts = []
        for text in itertools.islice(held_out_texts(data, self.text_field), BOOKS):
            parts = re.split(r"(?<=[.!?])\s+", " ".join(text[:LETTERS].split()))
            texts.append(parts[:-1] if len(text) > LETTERS else parts)
        texts = [parts for parts in texts if any(parts)]
        if not texts:
            raise UserError(f"Task {self.name}: {data.location} has no text to hide a needle in.")
        return texts


@dataclass(frozen=True)
class Needles(Haystack):
    """Keys with secret values. The score is the share of the asked keys' values that the answer names.

    A haystack of ``needles`` is facts about other keys. A ``word`` is an adjective and a noun. Depth 0 is the start of
    the haystack, 1 its end.
    """

    haystack: Literal["noise", "text", "needles"] = "noise"
    keys: PositiveInt = 1  # in the haystack, including the keys of the question
    values: PositiveInt = 1  # of each key
    queries: PositiveInt = 1  # keys in the question
    key: Literal["noun", "word", "uuid"] = "noun"
    value: Literal["number", "uuid"] = "number"
    digits: Digits = 7  # of a number
    #: Places of the first needle; None: anywhere.
    depths: Annotated[Sequence[Annotated[int | float, Field(ge=0, le=1)]], Field(min_length=1)] | None = None
    hint: bool = True  # announce the needles before the haystack

    unit: ClassVar[str] = "haystacks"

    def __post_init__(self) -> None:
        """Check that there are enough different keys and values."""
        # needles of the haystack have further keys
        max_keys = len(NOUNS) - (self.haystack == "needles") if self.key == "noun" else 10_000
        require(self, "keys", self.keys <= max_keys, f"1 to {max_keys}")
        require(self, "queries", self.queries <= self.keys, f"1 to keys={self.keys}")
        drawn, numbers = self.keys * self.values, 9 * 10 ** (self.digits - 1)
        enough = f"enough for keys * values = {drawn} different numbers, and not {numbers}: give more digits"
        require(self, "digits", self.value == "uuid" or drawn <= numbers, enough)

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> TextSample:
        """Draw keys, values and places, then the hay."""
        keys = draw_distinct(rng, self.key, self.keys)
        values = draw_distinct(rng, self.value, self.keys * self.values, self.digits)
        end = "\n" if self.haystack == "needles" else ""
        needles = [self.needle(keys[i // self.values], value) + end for i, value in enumerate(values)]
        spread = self.haystack == "text" and variant.depth is None
        fractions = sample_depths(rng, len(needles)) if spread else [rng.random() for _ in needles]
        if variant.depth is not None:
            fractions[0] = variant.depth
        hay, taken = sample_sentences(rng, material, size) if self.haystack != "needles" else [], set(keys)
        while len(hay) < size:
            if (key := draw(rng, self.key)) not in taken:
                hay.append(self.needle(key, draw(rng, self.value, self.digits)) + end)
        intro = f"{self.intro()}\n\n" if self.hint else ""
        references = values[: self.queries * self.values]
        context = intro + join(hay, needles, fractions)
        question = f"\n\n{self.ask(keys[: self.queries])}"
        return TextSample(context, question, references, [" " + ", ".join(references)])

    def needle(self, key: str, value: str) -> str:
        """Return the sentence with a value of a key."""
        subject = f"The secret {self._noun}" if self.values == 1 else f"One of the secret {self._noun}s"
        return f"{subject} of the {key} is {value}."

    def intro(self) -> str:
        """Return the text before the haystack."""
        if self.keys * self.values == 1 and self.haystack != "needles":
            return f"Somewhere in the following text a secret {self._noun} is hidden. Remember it."
        return f"Somewhere in the following text several secret {self._noun}s are hidden. Remember them."

    def ask(self, keys: Sequence[str]) -> str:
        """Return the question, with the beginning of the answer."""
        *first, last = (f"the {key}" for key in keys)
        owners = f"{', '.join(first)} and {last}" if first else last
        plural, verb = ("", "is") if len(keys) * self.values == 1 else ("s", "are")
        subject = f"secret {self._noun}{plural} of {owners}"
        count_text = f"all {self.values} " if self.values > 1 else "the "
        return f"Question: What {verb} {count_text}{subject}?\nAnswer: The {subject} {verb}"

    @property
    def _noun(self) -> str:
        return "number" if self.value == "number" else "code"


@dataclass(frozen=True)
class OneNeedle(Needles):
    """One value of one key is asked. The first value in the answer must be right."""

    values: Literal[1] = 1
    queries: Literal[1] = 1

    metric: ClassVar[str] = "exact match"

    def grade(self, text: str, sample: Sample) -> float:
        """Return 1.0 if the first value in the text is right."""
        pattern = r"\d+" if self.value == "number" else r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
        return float(re.findall(pattern, text)[:1] == sample.references)


@dataclass(frozen=True)
class ExactNeedle(OneNeedle):
    """One value of one key without generation: right if each token of the answer is the likeliest.

    Greedy decoding of the answer has this score, but takes much longer.
    """

    generates: ClassVar[bool] = False


@dataclass(frozen=True)
class Variables(Generated):
    """Variables are set to a number or to each other. The score is the named share of the variables with the number."""

    chains: PositiveInt = 2  # values; one is asked for
    hops: PositiveInt = 3  # variables that each value is copied to
    example: bool = False  # whether a solved sample, with shorter names, is put first

    def material(self, tokenizer: Tokenizer) -> dict[int, int]:
        """Return the number of filler sentences in the example, by length."""
        if not self.example:
            return {}

        def tokens(size: int) -> int:
            return len(tokenize(tokenizer, [solved(self._text_sample(random.Random(0), 3, size))])[0])

        return {n: largest(tokens, min(EXAMPLE, n // 4), 0) or 0 for n in self.lengths}

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> TextSample:
        """Draw the example, the chains and their places."""
        example = f"{solved(self._text_sample(rng, 3, material[variant.length]))}\n\n" if self.example else ""
        text_sample = self._text_sample(rng, 5, size)
        return text_sample._replace(context=example + text_sample.context)

    def _text_sample(self, rng: random.Random, letters: int, size: int) -> TextSample:
        length = self.hops + 1
        values = draw_distinct(rng, "number", self.chains, 5)
        names = draw_distinct(rng, "name", self.chains * length, letters)
        chains = [names[i * length : (i + 1) * length] for i in range(self.chains)]
        needles = interleave(rng, [assignments(*chain) for chain in zip(chains, values, strict=True)])
        fractions = sorted(rng.random() for _ in needles)
        intro = "The following text sets variables to numbers and to each other. Keep track of them."
        question = f"Question: Which {length} variables have the value {values[0]}?"
        lead = f"Answer: {length} variables have the value {values[0]}, they are:"
        context = f"{intro}\n\n{join(noise(size), needles, fractions)}"
        return TextSample(context, f"\n\n{question}\n{lead}", chains[0], [" " + ", ".join(chains[0])])


@dataclass(frozen=True)
class CommonWords(Generated):
    """A numbered list with ten words 30 times each and further words 3 times, after a solved example.

    Below 4,096 tokens the ten words occur 6 times, further words once.
    """

    unit: ClassVar[str] = "lists"

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> TextSample:
        """Draw the example and the words, ``size`` of them uncommon."""
        short = variant.length < SHORT
        example = self._text_sample(rng, (20 if short else 40) - COMMON, (3, 1) if short else (10, 3))
        text_sample = self._text_sample(rng, size, (6, 1) if short else (30, 3))
        return text_sample._replace(context=f"{solved(example)}\n\n{text_sample.context}")

    def _text_sample(self, rng: random.Random, uncommon: int, times: tuple[int, int]) -> TextSample:
        rng = random.Random(rng.random())  # the number of words must not change later draws
        words = shuffled_words(rng, COMMON + uncommon)
        common, uncommon_words = words[:COMMON], words[COMMON:]
        entries = common * times[0] + uncommon_words * times[1]
        rng.shuffle(entries)
        intro = "In the following numbered list some words stand more often than others. Remember those that do."
        question = f"Question: Which {COMMON} words stand most often in the list?"
        lead = f"Answer: The {COMMON} words that stand most often in the list are:"
        return TextSample(f"{intro}\n{numbered(entries)}", f"\n{question}\n{lead}", common, [" " + numbered(common)])


@dataclass(frozen=True)
class FrequentWords(Generated):
    """Coded words with the frequencies of a zeta distribution; the three most frequent after the dots are asked."""

    unit: ClassVar[str] = "coded texts"
    min_units: ClassVar[int] = 56  # from this size on the fourth rank is more frequent than the fifth

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> TextSample:
        """Draw the words, and give each its share of ``size``."""
        vocabulary = max(4, (variant.length - (self.generate or 0)) // 50)
        words = draw_distinct(rng, "code", vocabulary - 1, 6)
        counts = zeta_counts(size, vocabulary)
        text = [word for word, count in zip([DOTS, *words], counts, strict=True) for _ in range(count)]
        rng.shuffle(text)
        intro = "Read the following coded text and keep track of how often each coded word stands in it."
        question = "Question: Which are the three most frequent coded words in the text, the dots left out?"
        lead = "Answer: The three most frequent coded words are:"
        right = " " + ", ".join(words[:3])
        return TextSample(f"{intro}\n\n{' '.join(text)}", f"\n\n{question}\n{lead}", words[:3], [right])


class Item(NamedTuple):
    """A question about some of the documents."""

    question: str
    answers: list[str]  # all annotated answers
    gold: list[int]  # indices of the documents with the answer
    same_article: list[int]  # of further documents of the article, which are drawn first


Corpus = tuple[list[str], list[Item]]  # all documents, and the questions about them


@dataclass(frozen=True)
class DocumentQA(Generated):
    """A question whose documents stand among other documents. Right if the answer names an annotated answer."""

    unit: ClassVar[str] = "questions"
    min_units: ClassVar[int] = 0

    @property
    def reads_data(self) -> bool:
        """Whether the contexts contain texts from a folder or the hub."""
        return True

    @property
    def first(self) -> int:
        """Number of the first question, after the questions of smaller seeds."""
        return self.seed * self.repeats

    def identity(self) -> dict[str, Any]:
        """Return the options, and the first question for seeds above 0, whose first question once was another."""
        return super().identity() | ({"first": self.first} if self.seed else {})

    def material(self, tokenizer: Tokenizer) -> Corpus:
        """Read all questions and documents."""
        hub, folder, subset = SOURCES[self.name]
        _, location, rows = held_out(self, hub, folder, ("validation",), subset)
        corpus = (squad if self.name == "qa_1" else hotpot)(rows, location)
        if not corpus[1]:
            raise UserError(f"Task {self.name}: {location} has no question with an answer.")
        return corpus

    def max_units(self, material: Any, variant: Variant) -> int:
        """Return the number of documents without the question's own."""
        return len(material[0]) - len(self._item(material, variant).gold)

    def build(self, rng: random.Random, material: Any, variant: Variant, size: int) -> TextSample:
        """Draw ``size`` other documents and shuffle all."""
        documents, item = material[0], self._item(material, variant)
        same_article = list(item.same_article)
        rng.shuffle(same_article)
        draws, chosen = random.Random(rng.random()), dict.fromkeys(item.gold + same_article[:size])
        while len(chosen) < len(item.gold) + size:
            chosen[draws.randrange(len(documents))] = None
        order = list(chosen)
        rng.shuffle(order)
        listed = [f"Document {i}:\n{documents[index]}" for i, index in enumerate(order, start=1)]
        context = f"{ONLY}\n\nThe following are given documents.\n\n" + "\n\n".join(listed)
        right = [f" {answer}" for answer in item.answers]
        return TextSample(context, f"\n\n{ONLY}\n\nQuestion: {item.question}\nAnswer:", item.answers, right)

    def grade(self, text: str, sample: Sample) -> float:
        """Return 1.0 if the text contains an answer: RULER's ``string_match_part``."""
        return float(any(_contains(text, reference) for reference in sample.references))

    def _item(self, material: Corpus, variant: Variant) -> Item:
        return material[1][(self.first + variant.repeat) % len(material[1])]


def _contains(text: str, reference: str) -> bool:
    """Return whether a text contains a reference in any case, its control characters read as ends of lines."""
    return reference.lower() in re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip().lower()


def squad(rows: Iterable[Record], location: str) -> Corpus:
    """Read SQuAD without its unanswerable questions, but with their paragraphs."""
    documents, articles = dict[str, int](), dict[str, dict[int, None]]()
    questions: list[tuple[Record, list[str], int]] = []
    fields: dict[str, type | tuple[type, ...]] = {"title": str, "context": str, "question": str, "answers": dict}
    for row_number, row in enumerate(rows, start=1):
        check_fields(row, fields, f"{location} row {row_number}")
        index = documents.setdefault(row["context"], len(documents))
        articles.setdefault(row["title"], {})[index] = None
        texts = row["answers"].get("text", [])
        for text in texts:
            check_fields({"answers.text": text}, {"answers.text": str}, f"{location} row {row_number}")
        if answers := [text for text in dict.fromkeys(texts) if text.strip()]:  # any answer contains an empty one
            questions.append((row, answers, index))
    return list(documents), [
        Item(row["question"], answers, [index], [other for other in articles[row["title"]] if other != index])
        for row, answers, index in questions
    ]


def hotpot(rows: Iterable[Record], location: str) -> Corpus:
    """Read HotpotQA with its distractors. All paragraphs of a question are its own."""
    documents, items = dict[str, int](), []
    for row_number, row in enumerate(rows, start=1):
        row_location = f"{location} row {row_number}"
        check_fields(row, {"question": str, "answer": str, "context": dict}, row_location)
        try:
            paired = zip(row["context"]["title"], row["context"]["sentences"], strict=True)
            texts = [f"{title}\n{''.join(sentences)}" for title, sentences in paired]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{row_location}: context has no titles with sentences, as on the hub: {error!r}"
            ) from error
        gold = dict.fromkeys(documents.setdefault(text, len(documents)) for text in texts)
        items.append(Item(row["question"], [row["answer"]], list(gold), []))
    return list(documents), items


def largest(tokens: Callable[[int], int], room: int, low: int, high: int | None = None) -> int | None:
    """Return the largest size from ``low`` to ``high`` whose tokens fit, by bisection. None: no size fits."""
    if tokens(low) > room:
        return None
    size = low + PROBE
    while (high is None or size < high) and tokens(size) <= room:
        low, size = size, 2 * size
    sizes = range(low + 1, (size if high is None else min(size, high)) + 1)
    return low + bisect.bisect_right(sizes, room, key=tokens)


def sample_sentences(rng: random.Random, texts: Sequence[Sequence[str]] | None, count: int) -> list[str]:
    """Return ``count`` sentences from a random place of a random text. ``texts`` of None: from the filler."""
    if texts is None:
        return noise(count)
    text = rng.choice(texts)
    first = rng.randrange(len(text))
    return [text[(first + i) % len(text)] for i in range(count)]


def sample_depths(rng: random.Random, count: int) -> list[float]:
    """Draw fractions of a text: different fractions of 40 evenly spaced ones, or any if more than 40 are drawn."""
    if count > NUM_DEPTHS:
        return [rng.random() for _ in range(count)]
    return [depth / (NUM_DEPTHS - 1) for depth in rng.sample(range(NUM_DEPTHS), count)]


def noise(count: int) -> list[str]:
    """Return sentences of the filler, repeated; each repetition is a line."""
    return [NOISE[i % len(NOISE)] + "\n" * (i % len(NOISE) == len(NOISE) - 1) for i in range(count)]


def join(sentences: Sequence[str], needles: Sequence[str] = (), fractions: Sequence[float] = ()) -> str:
    """Join sentences, each needle at its fraction of them, with spaces, but without a space after a line break."""
    joined = list(sentences)
    for fraction, needle in sorted(zip(fractions, needles, strict=True), reverse=True):
        joined.insert(round(fraction * len(sentences)), needle)
    return "".join(sentence if sentence.endswith("\n") else sentence + " " for sentence in joined).rstrip()


def interleave(rng: random.Random, chains: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of all chains in a random order that keeps the order within each chain."""
    turns = [i for i, chain in enumerate(chains) for _ in chain]
    rng.shuffle(turns)
    left = [iter(chain) for chain in chains]
    return [next(left[i]) for i in turns]


def assignments(chain: Sequence[str], value: str) -> list[str]:
    """Return the statements that set the first variable to a value and copy it from variable to variable."""
    copies = [f"VAR {new} = VAR {old}." for old, new in itertools.pairwise(chain)]
    return [f"VAR {chain[0]} = {value}.", *copies]


def solved(sample: TextSample) -> str:
    """Return a sample with its answer, as an example."""
    return f"{sample.context}{sample.question}{sample.answers[0]}"


def numbered(words: Sequence[str]) -> str:
    """Return words as the entries of a numbered list in one line."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


def zeta_counts(total: int, ranks: int) -> list[int]:
    """Return floor(total k^-2 / zeta(2)), where zeta(2) is pi^2 / 6, for the ranks k = 1, 2, ..."""
    return [math.floor(6 * total / (math.pi * k) ** 2) for k in range(1, ranks + 1)]


def draw(rng: random.Random, kind: str, length: int = 0) -> str:
    """Draw a noun, a word (adjective and noun), a uuid of version 4, or a number, name or code of a length."""
    if kind == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    if kind == "number":  # without leading zeros
        return str(rng.randrange(10 ** (length - 1), 10**length))
    if kind in CHARACTERS:
        return "".join(rng.choices(CHARACTERS[kind], k=length))
    return "-".join(rng.choice(words) for words in KEYS[kind])


def draw_distinct(rng: random.Random, kind: str, count: int, length: int = 0) -> list[str]:
    """Draw words of a kind, see :func:`draw`, until ``count`` different ones were drawn."""
    words: dict[str, None] = {}
    while len(words) < count:
        words[draw(rng, kind, length)] = None
    return list(words)


def shuffled_words(rng: random.Random, count: int) -> list[str]:
    """Return different words in random order: nouns, adjectives and verbs, then pairs of nouns in one word."""
    words = list(dict.fromkeys((*NOUNS, *ADJECTIVES, *VERBS)))
    rng.shuffle(words)
    if count > len(words):
        pairs = list(itertools.permutations(NOUNS, 2))
        rng.shuffle(pairs)
        words += dict.fromkeys("".join(pair) for pair in pairs[: 2 * count])
    return words[:count]


# everyday English words, for keys that are drawn and lists that are counted
WORDS = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8")
ADJECTIVES, NOUNS, VERBS = (words.split() for words in WORDS.split("\n\n"))
#: Kinds of keys by the tables that their parts are drawn from, and kinds of names by their characters.
KEYS = {"noun": (NOUNS,), "word": (ADJECTIVES, NOUNS)}
CHARACTERS = {"name": string.ascii_uppercase, "code": string.ascii_lowercase}
