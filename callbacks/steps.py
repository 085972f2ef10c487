"""Callbacks at the end of an optimiser step, which may take several batches: validations, tokens per second."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor


class StepCallback(Callback):
    """A callback that acts at the end of each optimiser step."""

    _step = 0  # optimiser steps so far

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start at the step of the checkpoint, or at 0."""
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Call :meth:`on_step_end` after the last batch of a step."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self.on_step_end(trainer, pl_module)

    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Act at the end of an optimiser step."""


class ValidateAfterSteps(StepCallback):
    """Makes Lightning validate every ``every`` optimiser steps.

    Lightning counts batches, and the last step of an epoch may have fewer. Lightning would then validate and save
    inside a later step, and a resumed run would lack that step's accumulated gradient.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decide whether the last step of a resumed run is validated."""
        super().on_train_start(trainer, pl_module)
        self.on_step_end(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Decide whether Lightning validates after this batch."""
        trainer.val_check_batch = sys.maxsize  # no batch number reaches it
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make Lightning validate after every ``every`` steps."""
        due = self._step > 0 and self._step % self._every == 0
        # Lightning validates when its batch number is a multiple of val_check_batch: 1 always is, maxsize never is
        trainer.val_check_batch = 1 if due else sys.maxsize


class Throughput(StepCallback):
    """Logs `train/tokens_per_second` of all ranks, without padding and without the time of validations.

    Lightning's ThroughputMonitor waits for the device after each batch; this waits every ``log_every`` steps only.
    """

    def __init__(self, log_every: int) -> None:
        self._log_every = log_every
        self._tokens: Tensor | int = 0
        self._start = 0.0
        self._paused: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        super().on_train_start(trainer, pl_module)
        self._start, self._paused = time.perf_counter(), None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock again after a validation."""
        if self._paused is not None:
            self._start += time.perf_counter() - self._paused
            self._paused = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the tokens of a batch."""
        self._tokens = self._tokens + batch["attention_mask"].sum()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log and reset every `log_every` optimiser steps."""
        if self._step % self._log_every:
            return
        tokens = torch.as_tensor(self._tokens, device=pl_module.device)
        total = float(trainer.strategy.reduce(tokens, reduce_op="sum"))
        end = time.perf_counter()
        pl_module.log("train/tokens_per_second", total / (end - self._start))
        self._tokens, self._start = 0, end
