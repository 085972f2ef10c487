"""Rows of a dataset: on the Hugging Face hub, in a local folder of files, or written by save_to_disk."""

from __future__ import annotations

import csv
import gzip
import hashlib
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ag.errors import UserError

if TYPE_CHECKING:
    from ag.config.data import DataConfig, StoredConfig

Record = dict[str, Any]
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".csv", ".csv.gz", ".txt")
STATE = "state.json"  # a file in the folder of each dataset that save_to_disk wrote
LONGEST_CELL = 1 << 30  # characters in a cell of CSV; Python's own bound is 131,072
TOO_DEEP_ERROR = "has objects inside objects too deep to be read: leave the row out"


class DataError(UserError):
    """The data cannot be used; the message names the file and row, and the fix."""


class MissingSplitError(DataError):
    """The dataset has no such split."""


@dataclass(frozen=True)
class Source:
    """A dataset: on the hub, or in ``folder``.

    The folder holds ``SPLIT.jsonl`` or shards ``SPLIT-*.jsonl`` (other ENDINGS too), or the output of ``save_to_disk``
    of the datasets library: a folder for each split, or a single dataset, which is the training split.
    """

    name: str  # hub id, for example google/boolq
    subset: str | None = None  # configuration name on the hub
    revision: str | None = None  # git revision on the hub
    folder: Path | None = None  # read in place of the hub

    def where(self, split: str) -> str:
        """Name a split for messages: the file, or the hub id with the split."""
        if self.folder is None:
            return f"{self.name}[{split}]"
        files = self._split_files(split)
        return str(files[0]) if len(files) == 1 else f"{self.folder}/{split}-*"

    def identity(self, split: str) -> str:
        """Return a hash of a split's contents, or the fingerprint of ``datasets`` for the hub; raises like read."""
        if self.folder is None:
            return str(getattr(self._load_hub(split), "_fingerprint", self.revision))
        digest = hashlib.sha256()
        for part in self._split_files(split):
            for file in sorted(part.glob("*.arrow")) if part.is_dir() else [part]:
                with file.open("rb") as content:
                    digest.update(hashlib.file_digest(content, "sha256").digest())
        return digest.hexdigest()

    def read(self, split: str) -> Iterator[Record]:
        """Yield the rows of a split in their stored order.

        Raises:
            MissingSplitError: the dataset lacks the split.
            DataError: the dataset cannot be reached, or a file is damaged.
        """
        if self.folder is None:
            return iter(self._load_hub(split))
        return itertools.chain.from_iterable(map(read_file, self._split_files(split)))

    def _split_files(self, split: str) -> list[Path]:
        """Return the files of a split, or the folder that ``save_to_disk`` wrote of it."""
        assert self.folder is not None
        for folder in [self.folder / split, *([self.folder] if split == "train" else [])]:
            if _is_saved(folder):
                return [folder]
        whole_files = [file for end in ENDINGS if (file := self.folder / f"{split}{end}").is_file()]
        shards = sorted(file for file in self.folder.glob(f"{split}-*") if file.name.endswith(ENDINGS))
        if len(whole_files) + bool(shards) > 1:
            files = ", ".join(file.name for file in whole_files + shards[:2])
            raise DataError(f"{self.folder} has several files for split {split} ({files}): keep one, or shards alone")
        if split == "train" and not whole_files and not shards:  # a folder of texts
            other_split = re.compile(r"(validation|test)(-.*)?\.txt")
            shards = sorted(file for file in self.folder.glob("*.txt") if not other_split.fullmatch(file.name))
        if not whole_files and not shards:
            raise MissingSplitError(
                f"{self.folder} has no split {split}: expected {split}.jsonl (or {', '.join(ENDINGS[1:])}), shards "
                f"such as {split}-*.jsonl, or the output of save_to_disk"
            )
        return whole_files or shards

    def _load_hub(self, split: str) -> Iterable[Record]:
        import datasets

        try:
            rows: Iterable[Record] = datasets.load_dataset(self.name, self.subset, split=split, revision=self.revision)
        except Exception as error:  # the hub client raises many unrelated types
            if isinstance(error, ValueError) and "split" in str(error):
                raise MissingSplitError(f"hub dataset {self.name} has no split {split}: {error}") from error
            raise DataError(
                f"hub dataset {self.name} cannot be read ({error}): check its name and the connection, "
                "or give a local folder as root (ag.fit: data.root)"
            ) from error
        return rows


def dataset_of(data: StoredConfig) -> Source:
    """Find the dataset ``data.name``: under ``data.root`` if that is set, else in a folder of this name or on the hub.

    Raises:
        DataError: the name is neither a folder nor a hub id, or ``data.root`` holds no such folder.
    """
    folder = local_folder(data.root, data.name) if data.root else Path(data.name).expanduser()
    if not folder.is_dir() and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", data.name):
        raise DataError(f"data.name={data.name}: no such folder; expected one with train.jsonl, or ORG/NAME of the hub")
    return Source(data.name, data.subset, data.revision, folder if folder.is_dir() else None)


def num_held_out(source: Source, data: StoredConfig) -> int:
    """Return how many of the first training rows validate: 0 if there is a validation split.

    Raises:
        DataError: there is no validation split, and ``data.val_samples`` is not set or leaves no row to train on.
    """
    try:
        source.read("validation")
    except MissingSplitError as error:
        if data.val_samples is None:
            raise DataError(f"{error}; or set data.val_samples=N to validate on the first N training rows") from error
        rows = sum(1 for _ in itertools.islice(source.read("train"), data.val_samples + 1))
        if 0 < rows <= data.val_samples:
            raise DataError(
                f"data.val_samples={data.val_samples}: the training split {source.where('train')} has {rows} rows, and "
                f"its first rows are held out for validation: expected fewer than {rows}, to leave rows to train on; "
                "give a lower number, or a validation split"
            ) from error
        return data.val_samples
    return 0


def local_folder(root: str, name: str) -> Path:
    """Find a dataset's folder: ``root/name``, or ``root`` itself if it holds the files.

    Raises:
        DataError: neither exists.
    """
    nested = Path(root) / name
    if nested.is_dir():
        return nested
    if holds_rows(Path(root)):
        return Path(root)
    raise DataError(f"data.root={root} holds neither a folder {name} nor files such as train.jsonl[.gz]")


def dataset_name(data: DataConfig) -> str:
    """Return the name of a dataset for messages: its own, or ``data.root`` if that folder itself holds the rows."""
    root = getattr(data, "root", None)  # rows that are generated have none
    if root is None:
        return data.name
    return root if holds_rows(Path(root)) else f"{data.name} in {root}"


def holds_rows(folder: Path) -> bool:
    """Whether a folder itself contains files of rows, or the training split that ``save_to_disk`` wrote."""
    return any(file.name.endswith(ENDINGS) for file in folder.glob("*")) or _is_saved(folder / "train")


def _is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote this folder of a single dataset."""
    return (folder / STATE).is_file() and any(folder.glob("*.arrow"))


def check_fields(row: Mapping[str, Any], fields: Mapping[str, type | tuple[type, ...]], location: str) -> None:
    """Check that a row has the fields, of these types; ``location`` names file and row.

    Raises:
        DataError: a field is missing or has another type.
    """
    for name, kind in fields.items():
        if name not in row:
            raise DataError(f"{location} has no field {name}: expected {', '.join(fields)}; found {', '.join(row)}")
        if not isinstance(row[name], kind):
            expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise DataError(f"{location}: field {name} is {type(row[name]).__name__}, expected {expected}")


def read_file(file: Path) -> Iterator[Record]:
    """Yield the rows of a file, or of a folder that ``save_to_disk`` wrote; a plain text is one row.

    JSON and CSV are not read by ``datasets``, which gives each column one type: silently, integers become floats beside
    a float, texts that look like dates become dates, and short rows are filled up.

    Raises:
        DataError: the file is damaged, or has another format.
    """
    if file.is_dir():
        import datasets

        try:
            return iter(datasets.load_from_disk(str(file)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file} is no dataset that save_to_disk wrote, or damaged: {error}") from error
    if file.suffix == ".parquet":
        return _read_parquet(file)
    if ".csv" in file.suffixes:
        return _read_csv(file)
    if file.suffix == ".txt":
        return iter([{"text": "".join(line for _, line in _lines(file))}])
    return _read_json(file)


def _read_parquet(file: Path) -> Iterator[Record]:
    from pyarrow import ArrowException, parquet  # datasets brings it along

    try:
        with parquet.ParquetFile(file) as content:
            for batch in content.iter_batches():
                yield from batch.to_pylist()
    except (OSError, ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{file} is damaged, or no Parquet: {error}") from error


def _read_csv(file: Path) -> Iterator[Record]:
    """Yield the rows of a table with a header; every cell is text."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_CELL))
    rows = csv.reader((line for _, line in _lines(file)), strict=True)
    header: list[str] = []
    try:
        for cells in rows:
            if len(cells) < 2 and not "".join(cells).strip():
                continue  # a blank line
            if header and len(cells) != len(header):
                raise DataError(
                    f"{file} line {rows.line_num} has another number of cells than its header: {', '.join(header)}"
                )
            if header:
                yield dict(zip(header, cells, strict=True))
            # spreadsheets add empty columns, which no key names
            if not header and (twice := [name for name, count in Counter(cells).items() if name and count > 1]):
                raise DataError(f"{file} has the column {twice[0]} twice in its header: rename one of the two")
            header = header or cells
    except csv.Error as error:
        raise DataError(f"{file} is not CSV at line {rows.line_num}: {error}") from error


def _read_json(file: Path) -> Iterator[Record]:
    """Yield the objects of JSON lines or of a JSON array."""
    text = "".join(line for _, line in _lines(file)) if ".json" in file.suffixes else ""
    rows: Iterable[tuple[str, Any]]
    if text.lstrip().startswith("["):
        rows = ((f"row {number}", row) for number, row in enumerate(_json(text, str(file)), start=1))
    else:
        lines = ((f"line {number}", line) for number, line in _lines(file) if line.strip())
        rows = ((location, _json(line, f"{file} {location}")) for location, line in lines)
    for location, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{file} {location} is a {type(row).__name__}, expected a JSON object")
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{file} {location} has half of a surrogate pair: {error}") from error
        except RecursionError as error:
            raise DataError(f"{file} {location} {TOO_DEEP_ERROR}") from error
        yield row


def _json(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:  # a number may be too long
        raise DataError(f"{location} is not JSON that can be read: {error}") from error
    except RecursionError as error:
        raise DataError(f"{location} {TOO_DEEP_ERROR}") from error


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    opener = gzip.open if file.suffix == ".gz" else open
    number = 0
    # spreadsheets write a byte order mark first; CSV has line ends inside its cells
    with opener(file, "rt", encoding="utf-8-sig", newline="") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                yield number, line
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise DataError(f"{file} is damaged after line {number}: {error}") from error
