"""Where a task's rows come from: a local folder under ``root``, or the hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ag.data.sources import DataError, MissingSplitError, Record, Source, check_fields, local_folder


@dataclass(frozen=True)
class HeldOut:
    """The split of a dataset that a task runs on.

    Attributes:
        task: name of the task, for messages.
        source: the dataset.
        splits: the first of these that the dataset has.
        folder: its folder under a root, for messages.
    """

    task: str
    source: Source
    splits: Sequence[str]
    folder: str

    @classmethod
    def of(
        cls,
        task: str,
        root: str | None,
        hub: str,
        folder: str,
        splits: Sequence[str],
        subset: str | None = None,
        revision: str | None = None,
    ) -> HeldOut:
        """Find the dataset: ``root/folder``, ``root`` itself when that holds JSON lines, or the hub without a root.

        Raises:
            DataError: no such folder.
        """
        missing = cls(task, Source(hub, subset, revision), splits, folder)
        try:
            found = local_folder(root, folder) if root else None
        except DataError as error:
            raise missing.explain(error) from error
        return cls(task, Source(hub, subset, revision, found), splits, folder)

    def rows(self) -> tuple[str, Iterator[Record]]:
        """Return the split's name and its rows.

        Raises:
            DataError: it cannot be read; the message says how to get it.
        """
        for split in self.splits[:-1]:
            try:
                return split, self.source.read(split)
            except MissingSplitError:
                continue
            except DataError as error:
                raise self.explain(error) from error
        try:
            return self.splits[-1], self.source.read(self.splits[-1])
        except DataError as error:
            raise self.explain(error) from error

    def texts(self, field: str) -> Iterator[str]:
        """Return one field of each row, which must be a text.

        Raises:
            DataError: a row has no such field, or the split cannot be read.
        """
        split, rows = self.rows()
        for number, row in enumerate(rows, start=1):
            check_fields(row, {field: str}, f"{self.source.where(split)} row {number}")
            yield row[field]

    def explain(self, error: DataError) -> DataError:
        """Return the error with the ways to get the data."""
        hub = ", ".join(repr(word) for word in (self.source.name, self.source.subset) if word)
        return DataError(
            f"Task {self.task}: {error}. Give root=FOLDER with {self.folder}/{self.splits[0]}.jsonl[.gz] in it (rows "
            f'as on the hub), or fetch the data once with python -c "import datasets; datasets.load_dataset({hub})" '
            "and leave root out."
        )
