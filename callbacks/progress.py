"""Progress: a rich bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

import math
import sys
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import (
    BatchesProcessedColumn,
    CustomBarColumn,
    RichProgressBarTheme,
)
from rich.progress import ProgressColumn, TextColumn, TimeRemainingColumn

from ag.callbacks.steps import StepCallback
from ag.training.objectives import loss_names

FORMATS = {"train/evicted": ("evicted", ".1%"), "train/tokens_per_second": ("tokens/s", ".0f")}
VALIDATION_FORMATS = {
    "val/lm_loss": ("LM loss", ".3f"),
    "val/perplexity": ("perplexity", ".2f"),
    "val/accuracy": ("accuracy", ".1%"),
    "val/evicted": ("evicted", ".1%"),
}
LINES = 50


def progress_bar(log_every: int, bar: bool = True) -> ProgressBar:
    """Return a rich bar for a terminal, and lines of text for other outputs, or everywhere if ``bar`` is False.

    ``log_every`` is the number of optimiser steps between updates of the numbers.
    """
    return RichBar(log_every) if bar and sys.stdout.isatty() else TextBar(log_every)


def _training_numbers(trainer: Trainer) -> dict[str, str]:
    losses = {key: (name, ".3f") for key, name in loss_names(trainer.callback_metrics).items()}
    return _format_metrics(trainer, losses | FORMATS)


def _format_metrics(trainer: Trainer, formats: dict[str, tuple[str, str]]) -> dict[str, str]:
    metrics = trainer.callback_metrics
    return {name: f"{float(metrics[key]):{form}}" for key, (name, form) in formats.items() if key in metrics}


class RichBar(RichProgressBar):
    """Lightning's rich bar with LM loss, evicted share and tokens per second in 80 characters.

    Lightning's own columns leave no room for them, and it counts the epochs of a run of `max_steps` as "0/-2".
    """

    def __init__(self, log_every: int) -> None:
        super().__init__(refresh_rate=10, leave=True, theme=RichProgressBarTheme(metrics_text_delimiter="  "))
        self._log_every = log_every

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Return columns that leave room for the numbers in 80 characters."""
        return [
            TextColumn("[progress.description]{task.description}"),
            CustomBarColumn(bar_width=8),
            BatchesProcessedColumn(style=self.theme.batch_progress),
            TimeRemainingColumn(),
        ]

    def _get_train_description(self, current_epoch: int) -> str:
        if (self.trainer.max_epochs or -1) < 0:  # max_steps ends the run
            return f"Epoch {current_epoch}"
        return super()._get_train_description(current_epoch).rstrip()

    def _update_metrics(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # reading a metric synchronises with the device
        if trainer.global_step % self._log_every == 0:
            super()._update_metrics(trainer, pl_module)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the numbers beside the bar."""
        return dict(_training_numbers(trainer))


class TextBar(StepCallback, ProgressBar):
    """One line every few optimiser steps (about 50 in a run) and one for each validation.

    Lightning's bars write the same line again and again, which a log file keeps.
    """

    def __init__(self, log_every: int) -> None:
        super().__init__()
        self._log_every = log_every
        self._total = ""  # empty in a validation without training
        self._enabled = True

    def disable(self) -> None:
        """Print nothing (Lightning calls this on every rank but the first)."""
        self._enabled = False

    def enable(self) -> None:
        """Print again."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the number of steps between two lines: a multiple of `log_every`."""
        super().on_train_start(trainer, pl_module)
        total, self._every = trainer.estimated_stepping_batches, self._log_every
        if math.isfinite(total) and total > 0:
            self._total = f"/{int(total)}"
            self._every *= max(1, round(total / LINES / self._log_every))

    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print a line."""
        if self._step % self._every == 0:
            self._line(trainer, "step", _training_numbers(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the line of a validation."""
        self._line(trainer, "validation at step", _format_metrics(trainer, VALIDATION_FORMATS))

    def _line(self, trainer: Trainer, title: str, numbers: dict[str, str]) -> None:
        if self._enabled:
            shown = [f"{name} {number}" for name, number in numbers.items()]
            print("  ".join([f"{title} {trainer.global_step}{self._total}", *shown]), flush=True)
