"""Where a task's rows come from: a local folder under ``root``, or the hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ag.data.sources import DataError, MissingSplitError, Record, Source, check_fields, local_folder


@dataclass(frozen=True)
class HeldOut:
    """The split of a dataset that a task runs on."""

    task: str  # its name, for messages
    root: str | None  # holds ``folder``, or the JSON lines themselves; None: the hub
    hub: str  # id of the dataset
    folder: str  # its folder under a root
    splits: Sequence[str]  # the first of these that the dataset has
    subset: str | None = None  # configuration name on the hub
    revision: str | None = None  # git revision on the hub

    def rows(self) -> tuple[str, str, Iterator[Record]]:
        """Return the split's name, where it is, for messages, and its rows.

        Raises:
            DataError: it cannot be read; the message says how to get it.
        """
        try:
            folder = local_folder(self.root, self.folder) if self.root else None
            source = Source(self.hub, self.subset, self.revision, folder)
            *others, last = self.splits
            for split in others:
                with suppress(MissingSplitError):
                    return split, source.where(split), source.read(split)
            return last, source.where(last), source.read(last)
        except DataError as error:
            names = ", ".join(repr(word) for word in (self.hub, self.subset) if word)
            raise DataError(
                f"Task {self.task}: {error}. Give root=FOLDER with {self.folder}/{self.splits[0]}.jsonl[.gz] in it "
                '(rows as on the hub), or fetch the data once with python -c "import datasets; '
                f'datasets.load_dataset({names})" and leave root out.'
            ) from error

    def texts(self, field: str) -> Iterator[str]:
        """Return one field of each row, which must be a text."""
        _, where, rows = self.rows()
        for number, row in enumerate(rows, start=1):
            check_fields(row, {field: str}, f"{where} row {number}")
            yield row[field]
