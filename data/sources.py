"""Where rows come from: a dataset on the Hugging Face hub, or a local folder of JSON lines like it."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ag.errors import UserError

Record = dict[str, Any]


class DataError(UserError):
    """The data cannot be used; the message is one sentence that names the place and the fix."""


class MissingSplitError(DataError):
    """The dataset has no such split."""


@dataclass(frozen=True)
class Source:
    """A dataset: on the hub, or in ``folder`` as ``SPLIT.jsonl`` or ``SPLIT.jsonl.gz``.

    Attributes:
        name: hub id, for example ``google/boolq``.
        subset: configuration name of the hub dataset.
        revision: git revision of the hub dataset.
        folder: local folder that is read instead of the hub.
    """

    name: str
    subset: str | None = None
    revision: str | None = None
    folder: Path | None = None

    def where(self, split: str) -> str:
        """Name a split for messages: the file, or the hub id with the split."""
        if self.folder is None:
            return f"{self.name}[{split}]"
        return str(self._file(split))

    def read(self, split: str, streaming: bool = False) -> Iterator[Record]:
        """Give the rows of a split in their stored order.

        Args:
            split: ``train`` or ``validation``.
            streaming: read a hub dataset over the network row by row instead of downloading it first
                (local files are always read line by line).

        Raises:
            MissingSplitError: the dataset lacks the split.
            DataError: the dataset cannot be reached, or a file is damaged.
        """
        return self._read_hub(split, streaming) if self.folder is None else _read_lines(self._file(split))

    def _file(self, split: str) -> Path:
        assert self.folder is not None
        files = [self.folder / f"{split}.jsonl", self.folder / f"{split}.jsonl.gz"]
        for file in files:
            if file.is_file():
                return file
        raise MissingSplitError(f"{self.folder} has no split {split}: expected {split}.jsonl or {split}.jsonl.gz")

    def _read_hub(self, split: str, streaming: bool) -> Iterator[Record]:
        import datasets

        try:
            rows = datasets.load_dataset(
                self.name, self.subset, split=split, revision=self.revision, streaming=streaming
            )
        except Exception as error:  # the hub client raises many unrelated types
            if isinstance(error, ValueError) and "split" in str(error):
                raise MissingSplitError(f"hub dataset {self.name} has no split {split}: {error}") from error
            raise DataError(
                f"hub dataset {self.name} cannot be read ({error}): check its name and the connection, "
                "or set data.root to a local folder"
            ) from error
        return iter(rows)


def local_folder(root: str, name: str) -> Path:
    """Find a dataset's folder: ``root/name``, or ``root`` itself when that holds the files.

    Raises:
        DataError: neither exists.
    """
    nested = Path(root) / name
    if nested.is_dir():
        return nested
    if any(Path(root).glob("*.jsonl*")):
        return Path(root)
    raise DataError(f"data.root={root} holds neither a folder {name} nor JSON lines files (train.jsonl[.gz])")


def check_fields(row: Mapping[str, Any], fields: Mapping[str, type | tuple[type, ...]], place: str) -> None:
    """Check that a row has the fields, with their types.

    Args:
        row: one row.
        fields: name of each required field and its type (or types).
        place: file and row number, for the message.

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


def _read_lines(file: Path) -> Iterator[Record]:
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        for number in itertools.count(1):
            try:
                line = next(lines, None)
            except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
                raise DataError(f"{file} is damaged after line {number - 1}: {error}") from error
            if line is None:
                return
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{file} line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{file} line {number} is a {type(row).__name__}, expected a JSON object")
            yield row
