"""Plain documents, for continual pre-training and perplexity.

``packed``: documents, each followed by EOS, are joined and cut into rows of ``max_length`` tokens; all carry loss.
With ``cross_documents=false`` attention ends at every EOS, and the first token of a document carries no loss.
``split``: each document is cut into windows of a prompt and its continuation; the continuation carries loss.
``repeated``: each document is cut into passages, and a row is a passage with a copy of it, or of a chunk of it.
``responses``: see :mod:`ag.data.responses`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ag.data.collate import Collator, Row, Tokens, padding_token, start_tokens, tokenize, tokenize_after
from ag.data.module import Counts, DataKind, DataModule
from ag.data.responses import AGAIN, LEAD, Responses, responses
from ag.data.sources import DataError, Source, check_fields, dataset_of, held_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import Config, DataConfig

STEP = 64  # prompt lengths lie on this grid, so that the rows of a batch have few different lengths
DOCUMENTS = 64  # per call of the tokenizer
FORMAT = 8  # raise it when rows are cut in another way, so that earlier caches are not read
NONE = -1  # no prompt, nothing copied, no tokens without loss
ROW_SETTINGS = (
    *("text_field", "packing", "max_length", "prompt_min", "prompt_max", "continuation"),
    *("copy_max", "contexts", "responses"),
)


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
        counts = Counts(unit="documents", held_out=first)
        longest, start = min(data.max_length, context), start_tokens(tokenizer)
        cut: Packed | Windows | Repeated | Responses
        if data.packing == "packed":
            cut = _packed(data, tokenizer, longest, start, counts)
        elif data.packing == "repeated":
            cut = _repeated(data, tokenizer, longest, start, config.seed, counts)
        elif data.packing == "responses":
            cut = responses(data, tokenizer, longest, start, config.seed, counts)
        else:
            cut = _windows(data, longest, start, config.seed, counts)
        counts.cut_remedy = f"an end {counts.remedy}"
        end = cut.end if isinstance(cut, Packed) and not data.cross_documents else None

        train = TextRows(source, "train", data, tokenizer, cut, start=first)
        split = "train" if first else "validation"
        validation = TextRows(source, split, data, tokenizer, cut, stop=first or None, validates=True)
        training = _kept(train, counts, context, config.seed)
        groups = [(row,) for row in _kept(validation, counts, context, config.seed)]
        collator = Collator(padding_token(tokenizer), end, whole=data.packing == "repeated")
        return DataModule(training, groups, collator, data, config.seed, counts)


def _kept(rows: TextRows, counts: Counts, *more: object) -> Sequence[Row]:
    """Make all rows, or read them from ``data.cache``.

    ``datasets`` keeps them in a folder by the hash of all that they depend on. Of several processes one makes the rows
    while the others wait.

    Raises:
        DataError: the folder cannot be written, or its content is damaged.
    """
    data, tokenizer = rows.data, rows.tokenizer
    if data.cache is None:
        return list(rows)
    import datasets
    from datasets.fingerprint import Hasher

    backend = getattr(tokenizer, "backend_tokenizer", None)
    text_to_ids = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    identity = {
        "format": FORMAT,
        "source": [data.name, data.subset, rows.source.identity(rows.split), rows.split, rows.start, rows.stop],
        "tokenizer": [text_to_ids, tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template],
        "settings": [*(getattr(data, name) for name in ROW_SETTINGS), rows.limit, *more],
    }
    split, folder = counts.of(rows.validates), Path(data.cache)

    def make() -> Iterator[dict[str, Any]]:
        for row in rows:
            prompt = NONE if row.prompt_length is None else row.prompt_length
            first = NONE if row.loss is None else row.response_start
            yield {"tokens": row.tokens, "prompt": prompt, "first": first, "copied": row.copied or (NONE, NONE)}
        last = list(json.dumps(vars(split)).encode())
        yield {"tokens": last, "prompt": NONE, "first": NONE, "copied": (NONE, NONE)}

    kind = datasets.Value("int32")
    columns = {"tokens": datasets.List(kind), "prompt": kind, "first": kind, "copied": datasets.List(kind, length=2)}
    try:
        found = datasets.Dataset.from_generator(
            make, datasets.Features(columns), cache_dir=str(folder), fingerprint=Hasher.hash(identity)
        )
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, DataError) or not isinstance(cause, OSError | ValueError):
            raise cause from None
        raise DataError(
            f"data.cache={folder} cannot be used ({cause}): name a folder with room and permission, or delete this one"
        ) from error
    kept = CachedRows(found.with_format("numpy", dtype=np.int32))
    vars(split).update(kept.counts)
    return kept


class CachedRows(Sequence[Row]):
    """Rows on disk, mapped into memory; the tokens of the last record are no row, but the counts of the split."""

    def __init__(self, records: Any) -> None:
        self.records = records
        self.counts: dict[str, int] = json.loads(bytes(records[-1]["tokens"].tolist()))

    def __len__(self) -> int:
        return len(self.records) - 1

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # no slices
        record = self.records[range(len(self))[index]]
        return _row(record["tokens"], record["prompt"], record["first"], record["copied"])

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows; many records at once are read in a small part of the time."""
        records = self.records.select(range(len(self)))
        for some in records.iter(batch_size=1000):
            yield from map(_row, some["tokens"], some["prompt"], some["first"], some["copied"])


def _row(tokens: Tokens, prompt: Any, first: Any, copied: Tokens) -> Row:
    """Return the row of a record, in which -1 stands for None."""
    loss = None if first == NONE else np.arange(len(tokens)) >= first
    chunk = None if NONE in copied else (int(copied[0]), int(copied[1]))
    return Row(tokens, None if prompt == NONE else int(prompt), loss=loss, copied=chunk)


def _packed(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, longest: int, start: list[int], counts: Counts
) -> Packed:
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError(
            f"data.packing=packed puts an end-of-sequence token between documents, and the tokenizer "
            f"{tokenizer.name_or_path} has none: set tokenizer.eos_token, or data.packing=split"
        )
    if not data.cross_documents and start == [end]:
        raise DataError(
            f"data.cross_documents=false: the tokenizer {tokenizer.name_or_path} begins and ends documents alike, "
            "so that it does not tell them apart: use data.cross_documents=true"
        )
    return Packed(longest, start, int(end), counts)


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
            f"data.packing=repeated: rows of {longest} tokens leave {room // 2} for a passage, not {STEP}; "
            f"use a data.max_length of {2 * STEP + len(start) + len(again)} or more, and a model with that context"
        )
    counts.remedy = f"too short for a passage; use a lower data.max_length={data.max_length}"
    length = room - LEAD - data.copy_max
    if 0 < data.copy_max < length:
        return Repeated(length, data.copy_max, start, again, seed, counts)
    return Repeated(room // 2, None, start, again, seed, counts)


@dataclass(frozen=True)
class TextRows:
    """The first rows of the documents from ``start`` to ``stop``."""

    source: Source
    split: str
    data: DataConfig
    tokenizer: PreTrainedTokenizerBase
    cut: Packed | Windows | Repeated | Responses
    start: int = 0
    stop: int | None = None
    validates: bool = False

    @property
    def limit(self) -> int | None:
        """The most rows there are; None means that there is no bound."""
        return self.data.val_samples if self.validates else self.data.train_samples

    def __iter__(self) -> Iterator[Row]:
        return itertools.islice(self.cut.rows(self._tokenized(), self.validates), self.limit)

    def _tokenized(self) -> Iterator[list[int]]:
        where, field = self.source.where(self.split), self.data.text_field
        rows = itertools.islice(enumerate(self.source.read(self.split), start=1), self.start, self.stop)
        while some := list(itertools.islice(rows, DOCUMENTS)):
            for number, row in some:
                check_fields(row, {field: str}, f"{where} row {number}")
            yield from tokenize(self.tokenizer, [row[field] for _, row in some])


@dataclass(frozen=True)
class Packed:
    """Documents, joined and cut into rows of one length; the last row may be shorter."""

    length: int
    start: list[int]  # tokens before a document
    end: int  # the token after a document
    counts: Counts

    def rows(self, documents: Iterable[list[int]], validates: bool) -> Iterator[Row]:
        """Pack all tokenised documents."""
        counts = self.counts.of(validates)

        def whole() -> Iterator[list[int]]:
            for document in documents:
                counts.add(len(document))
                yield [*self.start, *document, self.end]

        tokens = itertools.chain.from_iterable(whole())
        while row := list(itertools.islice(tokens, self.length)):
            yield Row(np.array(row, dtype=np.int32))


@dataclass(frozen=True)
class Windows:
    """Windows of a prompt and its continuation, cut from each document; the rest at its end is left out."""

    lengths: tuple[int, ...]  # of prompts, ascending, BOS included
    continuation: int  # tokens after the prompt
    start: list[int]  # tokens before a window
    seed: int
    counts: Counts  # of documents, and of their ends

    def rows(self, documents: Iterable[list[int]], validates: bool) -> Iterator[Row]:
        """Cut each document into windows whose prompt lengths are drawn from (seed, document).

        Validation takes one window from the start of each document, with the longest prompt that fits.
        """
        counts = self.counts.of(validates)
        for number, tokens in enumerate(documents):
            counts.add(len(tokens))
            rng = np.random.default_rng([self.seed, number])
            position = 0
            while row := self._window(
                tokens, position, self.lengths[-1 if validates else rng.integers(len(self.lengths))]
            ):
                yield row
                position += len(row.tokens) - len(self.start)
                if validates:
                    break
            counts.keep(len(tokens) if validates and position else position, len(tokens))

    def _window(self, tokens: list[int], position: int, wanted: int) -> Row | None:
        room = len(self.start) + len(tokens) - position - self.continuation
        prompt = max((length for length in self.lengths if length <= min(wanted, room)), default=0)
        if not prompt:
            return None
        end = position + prompt + self.continuation - len(self.start)
        return Row(np.array([*self.start, *tokens[position:end]], dtype=np.int32), prompt)


@dataclass(frozen=True)
class Repeated:
    """Passages, each followed by a sentence and its copy, or a copy of a chunk of it; the whole row carries loss.

    The copy of a chunk begins with the last tokens of the chunk before it, which show the place in the passage.
    """

    length: int  # tokens of a passage
    copy: int | None  # tokens of a chunk, of which one is drawn for each passage; None means the whole passage
    start: list[int]  # tokens before it
    again: list[int]  # tokens between it and its copy
    seed: int
    counts: Counts  # of documents, and of their ends

    def rows(self, documents: Iterable[list[int]], validates: bool) -> Iterator[Row]:
        """Cut each document into passages; the rest at its end is left out. Validation takes one of each document."""
        counts = self.counts.of(validates)
        for number, tokens in enumerate(documents):
            counts.add(len(tokens))
            rng = np.random.default_rng([self.seed, number])
            starts = range(0, len(tokens) - self.length + 1, self.length)[: 1 if validates else None]
            yield from (self.row(tokens[at : at + self.length], rng) for at in starts)
            counts.keep(len(tokens) if validates and starts else len(starts) * self.length, len(tokens))

    def row(self, passage: list[int], rng: np.random.Generator) -> Row:
        """Return a passage, which is the prompt, with its copy."""
        prompt = [*self.start, *passage, *self.again]
        length = len(self.start) + len(passage)
        if self.copy is None:
            return Row(np.array([*prompt, *passage], dtype=np.int32), length)
        starts = range(0, len(passage), self.copy)
        first = starts[rng.integers(len(starts))]
        tokens = [*prompt, *passage[max(0, first - min(LEAD, self.copy)) : first + self.copy]]
        copied = len(self.start) + first, len(self.start) + min(first + self.copy, len(passage))
        return Row(np.array(tokens, dtype=np.int32), length, copied=copied)
