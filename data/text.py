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

from ag.config.data import OwnDataConfig, PackedConfig, RepeatedConfig, ResponsesConfig, SplitConfig, TextConfig
from ag.data.responses import LEAD_TOKENS, REPEAT_PROMPT, ResponseCutter, make_cutter
from ag.data.rows import Row, Tokens
from ag.data.sources import DataError, Source, check_fields, dataset_of, num_held_out
from ag.data.splits import Counts, DataKind, Splits
from ag.data.tokens import start_tokens, tokenize, tokenize_after

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import DataConfig

STEP = 64  # prompt lengths grow by it from data.prompt_min: rows of a batch then have few different lengths
DOCUMENTS = 64  # per call of the tokenizer
FORMAT = 9  # raise it when rows are cut in another way: earlier caches are then not read
NO_VALUE = -1  # no prompt, nothing copied, no tokens without loss
COLUMNS = ("tokens", "prompt", "context", "loss", "copied")  # of the records of ``data.cache``
ROW_SETTINGS = (
    *("text_field", "packing", "max_length", "prompt_min", "prompt_max", "continuation"),
    *("copy_max", "contexts", "responses"),
)


class Text(DataKind):
    """Plain documents."""

    def read(self, data: DataConfig, seed: int, tokenizer: PreTrainedTokenizerBase, context: int) -> Splits:
        """Read and tokenise the documents of ``data.name``.

        Without a validation split, the first ``data.val_samples`` training documents are held out.

        Raises:
            DataError: a folder, split or field is missing, or lengths do not fit.
        """
        assert isinstance(data, TextConfig)
        return cut_documents(data, seed, tokenizer, context)


def cut_documents(data: TextConfig, seed: int, tokenizer: PreTrainedTokenizerBase, context: int) -> Splits:
    """Read, tokenise and cut documents; see :meth:`Text.read`."""
    source = dataset_of(data)
    first = num_held_out(source, data)
    counts = Counts(unit="documents", held_out=first)
    longest, start = min(data.max_length, context), start_tokens(tokenizer)
    cut: Packed | Windows | Repeated | ResponseCutter
    if isinstance(data, PackedConfig):
        cut = _make_packed(data, tokenizer, longest, start, counts)
    elif isinstance(data, RepeatedConfig):
        cut = _make_repeated(data, tokenizer, longest, start, seed, counts)
    elif isinstance(data, ResponsesConfig):
        cut = make_cutter(data, tokenizer, longest, start, seed, counts)
    else:
        assert isinstance(data, SplitConfig)
        cut = _make_windows(data, longest, start, seed, counts)
    counts.cut_remedy = f"an end {counts.remedy}"
    apart = isinstance(data, PackedConfig) and not data.cross_documents
    end = cut.end if isinstance(cut, Packed) and apart else None

    train = TextRows(source, "train", data, tokenizer, cut, start=first)
    split = "train" if first else "validation"
    validation = TextRows(source, split, data, tokenizer, cut, stop=first or None, validates=True)
    training = _cached_or_made(train, counts, context, seed)
    groups = [(row,) for row in _cached_or_made(validation, counts, context, seed)]
    return Splits(training, groups, counts, end, loss_on_prompt=isinstance(data, RepeatedConfig))


def _cached_or_made(rows: TextRows, counts: Counts, *other_settings: object) -> Sequence[Row]:
    """Make all rows, or read them from ``data.cache``.

    ``datasets`` stores them in a folder, named by a hash of everything they depend on. One process makes the rows while
    further processes wait.

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
    settings = vars(OwnDataConfig()) | vars(data)  # all keys, so that caches of one class of data are found
    identity = {
        "format": FORMAT,
        "source": [data.name, data.subset, rows.source.identity(rows.split), rows.split, rows.start, rows.stop],
        "tokenizer": [text_to_ids, tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template],
        "settings": [*(settings[name] for name in ROW_SETTINGS), rows.limit, *other_settings],
    }
    split, folder = counts.of(rows.validates), Path(data.cache)

    def make() -> Iterator[dict[str, Any]]:
        for row in rows:
            loss = None if row.loss is None else (row.response_start, row.response_end)
            yield record(row.tokens, row.prompt_length, row.context_length, loss, row.copied)
        yield record(list(json.dumps(vars(split)).encode()))

    def record(
        tokens: Tokens | list[int],
        prompt: int | None = None,
        context: int | None = None,
        loss: tuple[int, int] | None = None,
        copied: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        return {
            "tokens": tokens,
            "prompt": NO_VALUE if prompt is None else prompt,
            "context": NO_VALUE if context is None else context,
            "loss": loss or (NO_VALUE, NO_VALUE),
            "copied": copied or (NO_VALUE, NO_VALUE),
        }

    number = datasets.Value("int32")
    pair = datasets.List(number, length=2)
    columns = {"tokens": datasets.List(number), "prompt": number, "context": number, "loss": pair, "copied": pair}
    try:
        dataset = datasets.Dataset.from_generator(
            make, datasets.Features(columns), cache_dir=str(folder), fingerprint=Hasher.hash(identity)
        )
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, DataError) or not isinstance(cause, OSError | ValueError):
            raise cause from None
        raise DataError(
            f"data.cache={folder} cannot be used ({cause}): name a folder with room and permission, or delete this one"
        ) from error
    cached = CachedRows(dataset.with_format("numpy", dtype=np.int32))
    vars(split).update(cached.counts)
    return cached


class CachedRows(Sequence[Row]):
    """Rows on disk, mapped into memory; the last record is no row: its tokens encode the counts of the split."""

    def __init__(self, records: Any) -> None:
        self.records = records
        self.counts: dict[str, int] = json.loads(bytes(records[-1]["tokens"].tolist()))

    def __len__(self) -> int:
        return len(self.records) - 1

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # no slices
        record = self.records[range(len(self))[index]]
        return _row(*(record[name] for name in COLUMNS))

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows; reading many records at once is much faster than one by one."""
        records = self.records.select(range(len(self)))
        for batch in records.iter(batch_size=1000):
            yield from map(_row, *(batch[name] for name in COLUMNS))


def _row(tokens: Tokens, prompt: Any, context: Any, loss: Tokens, copied: Tokens) -> Row:
    """Return the row of a record; -1 in a record stands for None."""
    (start, end), token_index = loss, np.arange(len(tokens))
    return Row(
        tokens,
        None if prompt == NO_VALUE else int(prompt),
        loss=None if start == NO_VALUE else (token_index >= start) & (token_index < end),
        copied=None if NO_VALUE in copied else (int(copied[0]), int(copied[1])),
        context_length=None if context == NO_VALUE else int(context),
    )


def _make_packed(
    data: PackedConfig, tokenizer: PreTrainedTokenizerBase, longest: int, start: list[int], counts: Counts
) -> Packed:
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError(
            f"data.packing=packed puts an end-of-sequence token between documents, and the tokenizer "
            f"{tokenizer.name_or_path} has none: set tokenizer.eos_token, or data.packing=split"
        )
    if not data.cross_documents and start == [end]:
        raise DataError(
            f"data.cross_documents=false: the tokenizer {tokenizer.name_or_path} begins and ends documents with one "
            "token, which leaves their borders unclear: use data.cross_documents=true"
        )
    return Packed(longest, start, int(end), counts)


def _make_windows(data: SplitConfig, longest: int, start: list[int], seed: int, counts: Counts) -> Windows:
    if data.prompt_max + data.continuation > longest:
        limit = f"the model's context {longest}" if longest < data.max_length else f"data.max_length={longest}"
        raise DataError(
            f"data.prompt_max={data.prompt_max} + data.continuation={data.continuation} exceed {limit}: lower "
            "data.prompt_max"
        )
    lengths = (*range(data.prompt_min, data.prompt_max, STEP), data.prompt_max)
    counts.remedy = (
        "too short for a prompt and its continuation; use a lower "
        f"data.prompt_min={data.prompt_min} or data.continuation={data.continuation}"
    )
    return Windows(lengths, data.continuation, start, seed, counts)


def _make_repeated(
    data: RepeatedConfig, tokenizer: PreTrainedTokenizerBase, longest: int, start: list[int], seed: int, counts: Counts
) -> Repeated:
    separator = tokenize_after(tokenizer, [REPEAT_PROMPT])[0]
    room = longest - len(start) - len(separator)
    if room // 2 < STEP:
        raise DataError(
            f"data.packing=repeated: rows of {longest} tokens leave {room // 2} for a passage, fewer than {STEP}; "
            f"use a data.max_length of {2 * STEP + len(start) + len(separator)} or more, and a model with that context"
        )
    counts.remedy = f"too short for a passage; use a lower data.max_length={data.max_length}"
    length = room - LEAD_TOKENS - data.copy_max
    if 0 < data.copy_max < length:
        return Repeated(length, data.copy_max, start, separator, seed, counts)
    return Repeated(room // 2, None, start, separator, seed, counts)


@dataclass(frozen=True)
class TextRows:
    """The rows of the documents from ``start`` to ``stop``, at most ``limit`` of them."""

    source: Source
    split: str
    data: TextConfig
    tokenizer: PreTrainedTokenizerBase
    cut: Packed | Windows | Repeated | ResponseCutter
    start: int = 0
    stop: int | None = None
    validates: bool = False

    @property
    def limit(self) -> int | None:
        """The largest number of rows. None: no bound."""
        return self.data.val_samples if self.validates else self.data.train_samples

    def __iter__(self) -> Iterator[Row]:
        return itertools.islice(self.cut.rows(self._tokenized(), self.validates), self.limit)

    def _tokenized(self) -> Iterator[list[int]]:
        source_name, field = self.source.where(self.split), self.data.text_field
        rows = itertools.islice(enumerate(self.source.read(self.split), start=1), self.start, self.stop)
        while numbered_rows := list(itertools.islice(rows, DOCUMENTS)):
            for number, row in numbered_rows:
                check_fields(row, {field: str}, f"{source_name} row {number}")
            yield from tokenize(self.tokenizer, [row[field] for _, row in numbered_rows])


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

        def with_markers() -> Iterator[list[int]]:
            for document in documents:
                counts.add(len(document))
                yield [*self.start, *document, self.end]

        tokens = itertools.chain.from_iterable(with_markers())
        while row := list(itertools.islice(tokens, self.length)):
            yield Row(np.array(row, dtype=np.int32))


@dataclass(frozen=True)
class Windows:
    """Windows of a prompt and its continuation, cut from each document; its last tokens may be left out."""

    lengths: tuple[int, ...]  # tokens of prompts, ascending, BOS included
    continuation: int  # tokens after the prompt
    start: list[int]  # tokens before a window
    seed: int
    counts: Counts  # counts of documents, and of tokens that were cut off their ends

    def rows(self, documents: Iterable[list[int]], validates: bool) -> Iterator[Row]:
        """Cut each document into windows whose prompt lengths are sampled with (seed, document).

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

    def _window(self, tokens: list[int], position: int, longest: int) -> Row | None:
        room = len(self.start) + len(tokens) - position - self.continuation
        prompt = max((length for length in self.lengths if length <= min(longest, room)), default=0)
        if not prompt:
            return None
        end = position + prompt + self.continuation - len(self.start)
        return Row(np.array([*self.start, *tokens[position:end]], dtype=np.int32), prompt)


@dataclass(frozen=True)
class Repeated:
    """Passages, each followed by a sentence and a copy of the passage or of one chunk; the whole row carries loss.

    The copy of a chunk begins with the last tokens of the previous chunk, which show where it begins in the passage.
    """

    length: int  # tokens of a passage
    copy: int | None  # tokens of a chunk; one chunk is sampled for each passage. None: the whole passage
    start: list[int]  # tokens before a passage
    separator: list[int]  # tokens between a passage and its copy
    seed: int
    counts: Counts  # counts of documents, and of tokens that were cut off their ends

    def rows(self, documents: Iterable[list[int]], validates: bool) -> Iterator[Row]:
        """Cut each document into passages and leave out its last tokens. Validation takes one passage per document."""
        counts = self.counts.of(validates)
        for number, tokens in enumerate(documents):
            counts.add(len(tokens))
            rng = np.random.default_rng([self.seed, number])
            starts = range(0, len(tokens) - self.length + 1, self.length)[: 1 if validates else None]
            yield from (self.row(tokens[at : at + self.length], rng) for at in starts)
            counts.keep(len(tokens) if validates and starts else len(starts) * self.length, len(tokens))

    def row(self, passage: list[int], rng: np.random.Generator) -> Row:
        """Return the row of a passage, which is the prompt, and its copy."""
        prompt = [*self.start, *passage, *self.separator]
        length = len(self.start) + len(passage)
        if self.copy is None:
            return Row(np.array([*prompt, *passage], dtype=np.int32), length)
        starts = range(0, len(passage), self.copy)
        first = starts[rng.integers(len(starts))]
        tokens = [*prompt, *passage[max(0, first - min(LEAD_TOKENS, self.copy)) : first + self.copy]]
        copied = len(self.start) + first, len(self.start) + min(first + self.copy, len(passage))
        return Row(np.array(tokens, dtype=np.int32), length, copied=copied)
