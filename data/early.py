"""The checks of training data that need neither torch nor a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ag.config.data import SftConfig, TextConfig
from ag.data.sources import Source, dataset_of, local_folder, num_held_out
from ag.data.templates import find_task, is_own

if TYPE_CHECKING:
    from ag.config import DataConfig


def check(data: DataConfig) -> None:
    """Refuse a local folder without the rows that a run reads. Datasets of the hub and generated rows are not checked.

    Raises:
        DataError: a folder or a split is missing, or ``data.val_samples`` leaves no row to train on.
    """
    if isinstance(data, SftConfig) and not is_own(data):
        task = find_task(data)
        if data.root is not None:
            source = Source(task.hub, folder=local_folder(data.root, task.folder))
            for split in ("train", "validation"):
                source.read(split)
    elif isinstance(data, SftConfig | TextConfig):
        source = dataset_of(data)
        if source.folder is not None:
            source.read("train")
            num_held_out(source, data)
