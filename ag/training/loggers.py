"""Loggers of metrics: metrics.csv always, TensorBoard and W&B on request."""

from __future__ import annotations

import csv
import os
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from ag.config.sections import WandbConfig
from ag.errors import need
from ag.files import read_metrics, replacing
from ag.training.artifacts import log_folder, run_id


class MetricsFile(Logger):
    """Writes `metrics.csv`: one row a step, on disk as soon as it is logged.

    `step` is the number of completed optimiser steps, as in the names of the checkpoints. Training and validation
    metrics of one step share a row; cells without a value are empty. Only the last row changes in place; a new column
    rewrites the file. A resumed run continues the file and drops the rows after its checkpoint. (Lightning's CSVLogger
    deletes the file of an earlier run in its folder.)
    """

    name, version = "metrics.csv", ""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._path = Path(run_dir) / "metrics.csv"
        self._columns: list[str] = []
        self._rows: dict[int, dict[str, float]] | None = None  # by step. None: nothing is logged yet
        self._last_row_start = 0  # where the last row begins in the file

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self._path.parent)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the recipe is in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write the metrics of one step, which Lightning counts from 0."""
        completed_steps = (step or 0) + 1
        if self._rows is None:
            # Rows after the last valid step belong to a future that the resumed run repeats. It may first validate the
            # checkpoint's own step, whose row is then continued.
            only_validation = all(name.startswith("val/") for name in metrics)
            last_valid_step = completed_steps if only_validation else completed_steps - 1
            self._rows = {int(row["step"]): row for row in read_metrics(self._path) if row["step"] <= last_valid_step}
        new = completed_steps not in self._rows
        old_row = self._rows.get(completed_steps, {})
        row = self._rows[completed_steps] = {"step": completed_steps} | old_row | dict(metrics)
        is_last = completed_steps == next(reversed(self._rows))
        if is_last and row.keys() <= set(self._columns):
            with self._path.open("r+", newline="") as file:
                self._last_row_start = file.seek(0, os.SEEK_END) if new else file.seek(self._last_row_start)
                file.truncate()
                self._writer(file).writerow(row)
            return
        self._columns = list(dict.fromkeys(name for columns in self._rows.values() for name in columns))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._path) as partial, partial.open("w", newline="") as file:
            writer = self._writer(file)
            writer.writeheader()
            *earlier_rows, last_row = self._rows.values()
            writer.writerows(earlier_rows)
            self._last_row_start = file.tell()
            writer.writerow(last_row)

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, lineterminator="\n")


def build_loggers(
    names: Collection[str], run_dir: Path, wandb: WandbConfig, recipe: dict[str, Any], step: int = 0
) -> list[Logger]:
    """Return the loggers of a run, which write to its folder: metrics.csv, and ``tensorboard`` and ``wandb`` by name.

    ``recipe`` has the keys and values of the run, for W&B; ``step`` is the number of optimiser steps in the checkpoint
    that the run continues, and TensorBoard drops later steps.
    """
    loggers: list[Logger] = [MetricsFile(run_dir)]
    if "tensorboard" in names:
        need("tensorboard", "tensorboard", "logger=[tensorboard]")
        purge = step or None  # Lightning counts from 0: the first step after the checkpoint has this number
        loggers.append(
            TensorBoardLogger(run_dir, name="tensorboard", version="", default_hp_metric=False, purge_step=purge)
        )
    if "wandb" in names:
        logger = WandbLogger(
            project=wandb.project,
            name=run_dir.name,
            save_dir=run_dir,
            offline=wandb.offline,
            id=_run_id(run_dir),
            config=recipe,
        )
        logger._wandb_init.pop("anonymous", None)  # W&B warns of this argument of Lightning 2.6
        loggers.append(logger)
    return loggers


def log_export(loggers: Iterable[Logger], folder: Path, recipe: str, metrics: Mapping[str, float]) -> None:
    """Log an export as an artifact of W&B; runs of one recipe make versions of it."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            log_folder(logger.experiment, folder, f"{recipe}-export", "export", metrics)


_run_id = rank_zero_only(run_id)
