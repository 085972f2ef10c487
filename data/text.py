"""Plain documents, for continual pre-training and perplexity.

``packed``: documents, each followed by EOS, are joined and cut into rows of ``max_length`` tokens; all carry loss.
With ``cross_documents=false`` attention ends at every EOS, and the first token of a document carries no loss.
``split``: each document is cut into windows of a prompt and its continuation; the continuation carries loss.
``repeated``: each document is cut into passages, and a row is a passage with a copy of it, or of a chunk of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ag.data.cache import cached, tokenizer_identity
from ag.data.collate import Collator, Row, padding_token, start_tokens, tokenize, tokenize_after
from ag.data.kinds import DataKind
from ag.data.module import Counts, DataModule
from ag.data.sources import DataError, Source, check_fields, dataset_of, held_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import Config, DataConfig

STEP = 64  # prompt lengths lie on this grid, so that the rows of a batch have few different lengths
DOCUMENTS = 64  # per call of the tokenizer
AGAIN = "\n\nThe same text once more, word for word:\n\n"  # between a passage and its copy
LEAD = 8  # last tokens of the chunk before one that is repeated
ROW_SETTINGS = ("text_field", "packing", "max_length", "prompt_min", "prompt_max", "continuation", "copy_max")

Cut = Callable[[Iterable[list[int]]], Iterator[Row]]


class Text(DataKind):
    """Plain documents."""

    def build(self, config: Config, tokenizer: PreTrainedTokenizerBase, context: int) -> DataModule:
        """Read and tokenise the documents of ``config.data.name``.

        Without a validation split, the first ``data.val_samples`` training documents are held out.

        Raises:
            DataError: missing folder, split or field, lengths that do not fit, or no row at all.
        """
        data = config.data
        source = dataset_of(data)
        first = held_out(source, data)
        counts = Counts(held_out=first)
        longest, start = min(data.max_length, context), start_tokens(tokenizer)
        cut: Packed | Windows | Repeated
        if data.packing == "packed":
            cut = _packed(data, tokenizer, longest, start)
        elif data.packing == "repeated":
            cut = _repeated(data, tokenizer, longest, start, config.seed, counts)
        else:
            cut = _windows(data, longest, start, config.seed, counts)
        end = cut.end if isinstance(cut, Packed) and not data.cross_documents else None

        def rows(split: str, cut: Cut, limit: int | None, start: int = 0, stop: int | None = None) -> TextRows:
            return TextRows(source, split, data.text_field, data.streaming, tokenizer, cut, limit, start, stop)

        train = rows("train", cut.train, data.train_samples, start=first)
        if first:
            validation = rows("train", cut.validation, data.val_samples, stop=first)
        else:
            validation = rows("validation", cut.validation, data.val_samples)
        training = train if data.streaming else _kept(train, data, counts, context, config.seed)
        before = counts.skipped
        groups = [(row,) for row in _kept(validation, data, counts, context, config.seed)]
        counts.val_skipped = counts.skipped - before
        collator = Collator(padding_token(tokenizer), end, whole=data.packing == "repeated")
        return DataModule(training, groups, collator, data, config.seed, counts)


def _kept(rows: TextRows, data: DataConfig, counts: Counts, *more: object) -> Sequence[Row]:
    """Make all rows now, or take them from ``data.cache``."""
    if data.cache is None:
        return list(rows)
    before = counts.skipped
    identity = {
        "source": [data.name, data.subset, rows.source.identity(rows.split), rows.split, rows.start, rows.stop],
        "tokenizer": tokenizer_identity(rows.tokenizer),
        "settings": [*(getattr(data, name) for name in ROW_SETTINGS), rows.limit, *more],
    }
    found, measured = cached(
        Path(data.cache).expanduser(), identity, lambda: rows, lambda: {"skipped": counts.skipped - before}
    )
    counts.skipped = before + measured["skipped"]
    return found


def _packed(data: DataConfig, tokenizer: PreTrainedTokenizerBase, longest: int, start: list[int]) -> Packed:
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError(
            f"data.packing=packed puts an end-of-sequence token between documents, and the tokenizer "
            f"{tokenizer.name_or_path} has none: set tokenizer.eos_token, or data.packing=split"
        )
    if not data.cross_documents and start == [end]:
        raise DataError(
            f"data.cross_documents=false tells documents apart by their end-of-sequence token, and the tokenizer "
            f"{tokenizer.name_or_path} also begins them with it: use data.cross_documents=true"
        )
    return Packed(longest, start, int(end))


def _windows(data: DataConfig, longest: int, start: list[int], seed: int, counts: Counts) -> Windows:
    if data.prompt_max + data.continuation > longest:
        limit = f"the model's context {longest}" if longest < data.max_length else f"data.max_length={longest}"
        raise DataError(
            f"data.prompt_max={data.prompt_max} + data.continuation={data.continuation} exceed {limit}: lower "
            "data.prompt_max"
        )
    lengths = (*range(data.prompt_min, data.prompt_max, STEP), data.prompt_max)
    counts.remedy = (
        "too short for a prompt and what follows it; use a lower "
        f"data.prompt_min={data.prompt_min} or data.continuation={data.continuation}"
    )
    return Windows(lengths, data.continuation, start, seed, counts)


def _repeated(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, longest: int, start: list[int], seed: int, counts: Counts
) -> Repeated:
    again = tokenize_after(tokenizer, [AGAIN])[0]
    room = longest - len(start) - len(again)
    if room // 2 < STEP:
        raise DataError(
            f"data.packing=repeated: rows of {longest} tokens leave {room // 2} for a passage, expected at least "
            f"{STEP}: use a data.max_length of {2 * STEP + len(start) + len(again)} or more, and a model with that "
            "context"
        )
    counts.remedy = f"too short for a passage; use a lower data.max_length={data.max_length}"
    length = room - LEAD - data.copy_max
    if 0 < data.copy_max < length:
        return Repeated(length, data.copy_max, start, again, seed, counts)
    return Repeated(room // 2, None, start, again, seed, counts)


@dataclass(frozen=True)
class TextRows:
    """The first ``limit`` rows of the documents from ``start`` to ``stop``, made anew each time they are iterated."""

    source: Source
    split: str
    field: str
    streaming: bool
    tokenizer: PreTrainedTokenizerBase
    cut: Cut
    limit: int | None = None
    start: int = 0
    stop: int | None = None

    def __iter__(self) -> Iterator[Row]:
        return itertools.islice(self.cut(self._tokenized()), self.limit)

    def _tokenized(self) -> Iterator[list[int]]:
        documents = itertools.islice(self._documents(), self.start, self.stop)
        while texts := list(itertools.islice(documents, DOCUMENTS)):
            yield from tokenize(self.tokenizer, texts)

    def _documents(self) -> Iterator[str]:
        where = self.source.where(self.split)
        for number, row in enumerate(self.source.read(self.split, self.streaming), start=1):
            check_fields(row, {self.field: str}, f"{where} row {number}")
            yield row[self.field]


@dataclass(frozen=True)
class Packed:
    """Documents one after another in rows of one length; the last row may be shorter."""

    length: int
    start: list[int]  # tokens before a document
    end: int  # the token after a document

    def train(self, documents: Iterable[list[int]]) -> Iterator[Row]:
        """Pack tokenised documents."""
        tokens = itertools.chain.from_iterable([*self.start, *document, self.end] for document in documents)
        while row := list(itertools.islice(tokens, self.length)):
            yield Row(np.array(row, dtype=np.int32))

    validation = train


@dataclass(frozen=True)
class Windows:
    """Windows of a prompt and its continuation, cut from each document; what remains at its end is left out."""

    lengths: tuple[int, ...]  # of prompts, ascending, BOS included
    continuation: int  # tokens after the prompt
    start: list[int]  # tokens before a window
    seed: int
    counts: Counts  # skipped: documents too short for one window

    def train(self, documents: Iterable[list[int]]) -> Iterator[Row]:
        """Cut each document into consecutive windows, the prompt's length drawn from (seed, document)."""
        for number, tokens in enumerate(documents):
            rng = np.random.default_rng([self.seed, number])
            position = 0
            while row := self._window(tokens, position, self.lengths[rng.integers(len(self.lengths))]):
                yield row
                position += len(row.tokens) - len(self.start)
            self.counts.skipped += position == 0

    def validation(self, documents: Iterable[list[int]]) -> Iterator[Row]:
        """Cut one window from the start of each document, with the longest prompt that fits."""
        for tokens in documents:
            row = self._window(tokens, 0, self.lengths[-1])
            if row:
                yield row
            else:
                self.counts.skipped += 1

    def _window(self, tokens: list[int], position: int, wanted: int) -> Row | None:
        room = len(self.start) + len(tokens) - position - self.continuation
        prompt = max((length for length in self.lengths if length <= min(wanted, room)), default=0)
        if not prompt:
            return None
        end = position + prompt + self.continuation - len(self.start)
        return Row(np.array([*self.start, *tokens[position:end]], dtype=np.int32), prompt)


@dataclass(frozen=True)
class Repeated:
    """Passages, each followed by a sentence and by itself, or a chunk of itself, once more; the whole row carries loss.

    A chunk that is not the passage's beginning comes behind the end of the one before, which says where to go on.
    """

    length: int  # tokens of a passage
    copy: int | None  # tokens of a chunk, of which one is drawn for each passage; None: it is repeated as a whole
    start: list[int]  # tokens before it
    again: list[int]  # tokens between it and its copy
    seed: int
    counts: Counts  # skipped: documents too short for one passage

    def train(self, documents: Iterable[list[int]]) -> Iterator[Row]:
        """Cut each document into passages; what remains at its end is left out."""
        for number, tokens in enumerate(documents):
            rng = np.random.default_rng([self.seed, number])
            starts = range(0, len(tokens) - self.length + 1, self.length)
            yield from (self.row(tokens[at : at + self.length], rng) for at in starts)
            self.counts.skipped += not starts

    def validation(self, documents: Iterable[list[int]]) -> Iterator[Row]:
        """Take the first passage of each document."""
        for number, tokens in enumerate(documents):
            if len(tokens) >= self.length:
                yield self.row(tokens[: self.length], np.random.default_rng([self.seed, number]))
            else:
                self.counts.skipped += 1

    def row(self, passage: list[int], rng: np.random.Generator) -> Row:
        """Return a passage with its copy; the passage is the prompt."""
        prompt = [*self.start, *passage, *self.again]
        length = len(self.start) + len(passage)
        if self.copy is None:
            return Row(np.array([*prompt, *passage], dtype=np.int32), length)
        starts = range(0, len(passage), self.copy)
        first = starts[rng.integers(len(starts))]
        tokens = [*prompt, *passage[max(0, first - min(LEAD, self.copy)) : first + self.copy]]
        copied = len(self.start) + first, len(self.start) + min(first + self.copy, len(passage))
        return Row(np.array(tokens, dtype=np.int32), length, copied=copied)
