"""Where rows come from: a dataset on the Hugging Face hub, or a local folder of JSON or Parquet like it."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ag.errors import UserError

if TYPE_CHECKING:
    from ag.config import DataConfig

Record = dict[str, Any]
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


class DataError(UserError):
    """The data cannot be used; the message is one sentence that names the place and the fix."""


class MissingSplitError(DataError):
    """The dataset has no such split."""


@dataclass(frozen=True)
class Source:
    """A dataset: on the hub, or in ``folder`` as ``SPLIT.jsonl`` or as shards ``SPLIT-*.jsonl``; see ENDINGS."""

    name: str  #: hub id, for example google/boolq
    subset: str | None = None  #: configuration name on the hub
    revision: str | None = None  #: git revision on the hub
    folder: Path | None = None  #: is read instead of the hub

    def where(self, split: str) -> str:
        """Name a split for messages: the file, or the hub id with the split."""
        if self.folder is None:
            return f"{self.name}[{split}]"
        files = self._files(split)
        return str(files[0]) if len(files) == 1 else f"{self.folder}/{split}-*"

    def identity(self, split: str) -> str:
        """Return a hash of the contents of a split; of a hub dataset, the fingerprint that ``datasets`` gives it.

        Raises:
            MissingSplitError: the dataset lacks the split.
            DataError: the dataset cannot be reached.
        """
        if self.folder is None:
            return str(getattr(self._load_hub(split, False), "_fingerprint", self.revision))
        digest = hashlib.sha256()
        for file in self._files(split):
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        return digest.hexdigest()

    def read(self, split: str, streaming: bool = False) -> Iterator[Record]:
        """Give the rows of a split in their stored order; streaming, the hub is read over the network row by row.

        Raises:
            MissingSplitError: the dataset lacks the split.
            DataError: the dataset cannot be reached, or a file is damaged.
        """
        if self.folder is None:
            return iter(self._load_hub(split, streaming))
        return itertools.chain.from_iterable(map(_read, self._files(split)))

    def _files(self, split: str) -> list[Path]:
        assert self.folder is not None
        whole = [file for end in ENDINGS if (file := self.folder / f"{split}{end}").is_file()]
        shards = sorted(file for file in self.folder.glob(f"{split}-*") if file.name.endswith(ENDINGS))
        if not whole and not shards:
            raise MissingSplitError(
                f"{self.folder} has no split {split}: expected {split}.jsonl, {split}.jsonl.gz, .json or .parquet, or "
                f"shards such as {split}-*.jsonl[.gz]"
            )
        return whole[:1] or shards

    def _load_hub(self, split: str, streaming: bool) -> Iterable[Record]:
        import datasets

        try:
            rows: Iterable[Record] = datasets.load_dataset(
                self.name, self.subset, split=split, revision=self.revision, streaming=streaming
            )
        except Exception as error:  # the hub client raises many unrelated types
            if isinstance(error, ValueError) and "split" in str(error):
                raise MissingSplitError(f"hub dataset {self.name} has no split {split}: {error}") from error
            raise DataError(
                f"hub dataset {self.name} cannot be read ({error}): check its name and the connection, "
                "or set data.root to a local folder"
            ) from error
        return rows


def held_out(source: Source, data: DataConfig) -> int:
    """Return how many training rows validate, from the first on: 0 where there is a validation split.

    Raises:
        DataError: there is none, and ``data.val_samples`` does not say how many.
    """
    try:
        source.read("validation", data.streaming)
    except MissingSplitError as error:
        if data.val_samples is None:
            raise DataError(
                f"{error}; set data.val_samples=N to validate on the first N training rows instead"
            ) from error
        return data.val_samples
    return 0


def local_folder(root: str, name: str) -> Path:
    """Find a dataset's folder: ``root/name``, or ``root`` itself when that holds the files.

    Raises:
        DataError: neither exists.
    """
    nested = Path(root) / name
    if nested.is_dir():
        return nested
    if any(file.name.endswith(ENDINGS) for file in Path(root).glob("*")):
        return Path(root)
    raise DataError(f"data.root={root} holds neither a folder {name} nor files such as train.jsonl[.gz]")


def check_fields(row: Mapping[str, Any], fields: Mapping[str, type | tuple[type, ...]], place: str) -> None:
    """Check that a row has the fields, of these types; ``place`` names file and row.

    Raises:
        DataError: a field is missing or has another type.
    """
    for name, kind in fields.items():
        if name not in row:
            raise DataError(f"{place} has no field {name}: expected {', '.join(fields)}; found {', '.join(row)}")
        if not isinstance(row[name], kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            wanted = " or ".join(k.__name__ for k in kinds)
            raise DataError(f"{place}: field {name} is {type(row[name]).__name__}, expected {wanted}")


def _read(file: Path) -> Iterator[Record]:
    """Give the rows of a file: Parquet, JSON lines, or one array of JSON objects.

    Raises:
        DataError: the file is damaged, or holds something else.
    """
    if file.suffix == ".parquet":
        return _read_parquet(file)
    return _objects(file, _read_array(file) if ".json" in file.suffixes else _read_lines(file))


def _read_parquet(file: Path) -> Iterator[Record]:
    from pyarrow import ArrowException, parquet  # datasets brings it along

    try:
        with parquet.ParquetFile(file) as content:
            for batch in content.iter_batches():
                yield from batch.to_pylist()
    except (OSError, ArrowException) as error:
        raise DataError(f"{file} is damaged, or no Parquet: {error}") from error


def _objects(file: Path, rows: Iterator[tuple[str, Any]]) -> Iterator[Record]:
    for place, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{file} {place} is a {type(row).__name__}, expected a JSON object")
        yield row


def _read_array(file: Path) -> Iterator[tuple[str, Any]]:
    """Give the elements of an array; a file of JSON lines under the name of one is read as such."""
    text = "".join(line for _, line in _lines(file))
    if not text.lstrip().startswith("["):
        yield from _read_lines(file)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def _read_lines(file: Path) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(file):
        try:
            yield f"line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{file} line {number} is not JSON: {error}") from error


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    opener = gzip.open if file.suffix == ".gz" else open
    number = 0
    with opener(file, "rt", encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                yield number, line
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise DataError(f"{file} is damaged after line {number}: {error}") from error
