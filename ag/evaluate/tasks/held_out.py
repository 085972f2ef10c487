"""The rows of a task, from a local folder under ``root`` or from the hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ag.data.sources import DataError, MissingSplitError, Record, Source, check_fields, local_folder
from ag.evaluate.tasks.base import Task


class HeldOut(NamedTuple):
    """A split of a task's data."""

    split: str  # its name
    location: str  # for messages
    rows: Iterator[Record]


def held_out(
    task: Task, hub: str, folder: str, splits: Sequence[str], subset: str | None = None, revision: str | None = None
) -> HeldOut:
    """Return the split of a task's data with its rows.

    Args:
        task: the task. Its root has the folder, or the JSON lines themselves.
        hub: id of the dataset.
        folder: the dataset's folder under a root.
        splits: names of splits. The first that the dataset has is read.
        subset: configuration name on the hub.
        revision: git revision on the hub.

    Raises:
        DataError: the split cannot be read; the message says how to get it.
    """
    try:
        source = Source(hub, subset, revision, local_folder(task.root, folder) if task.root else None)
        *earlier_splits, split = splits
        for earlier in earlier_splits:
            with suppress(MissingSplitError):
                return HeldOut(earlier, source.where(earlier), source.read(earlier))
        return HeldOut(split, source.where(split), source.read(split))
    except DataError as error:
        names = ", ".join(repr(word) for word in (hub, subset) if word)
        raise DataError(
            f"Task {task.name}: {error}. Give root=FOLDER with {folder}/{splits[0]}.jsonl[.gz] in it (rows as on the "
            f'hub), or fetch the data once with python -c "import datasets; datasets.load_dataset({names})" and leave '
            "root out."
        ) from error


def held_out_texts(data: HeldOut, field: str) -> Iterator[str]:
    """Return one field, a text, of each row."""
    for number, row in enumerate(data.rows, start=1):
        check_fields(row, {field: str}, f"{data.location} row {number}")
        yield row[field]
