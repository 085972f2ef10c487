"""What happens at the end of an optimiser step, of which one may take several batches: validations, tokens a second."""

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

    _step = 0  # optimiser steps done, as far as this callback has seen

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin at the step that the run was resumed from, or at 0."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Act if this batch was the last one of its step."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self.on_step_end(trainer, pl_module)

    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Act at the end of an optimiser step."""


class ValidateAfterSteps(StepCallback):
    """Lets Lightning validate after every so many optimiser steps.

    Lightning counts batches, of which the last step of an epoch may have fewer than others: it would validate, and a
    checkpoint be written, between the batches of a later step, whose gradient a resumed run would not have.

    Args:
        every: optimiser steps.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let a run that is resumed know whether its last step was to be validated."""
        super().on_train_start(trainer, pl_module)
        self.on_step_end(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Say whether a step ended here that is to be validated."""
        trainer.val_check_batch = sys.maxsize  # of whose multiples the number of the batch is none
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let Lightning validate if this step is to be validated."""
        due = self._step > 0 and self._step % self._every == 0
        trainer.val_check_batch = 1 if due else sys.maxsize


class Throughput(StepCallback):
    """Logs `train/tokens_per_second`: the tokens of all ranks since the last log step, over the time since.

    Padding does not count, nor does the time spent in validation.

    Args:
        log_every: optimiser steps between log lines.
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
        """Start the clock again, without the time of a validation, its pictures and its checkpoint."""
        if self._paused is not None:
            self._start += time.perf_counter() - self._paused
            self._paused = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the tokens of a batch."""
        self._tokens = self._tokens + batch["attention_mask"].sum()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After every `log_every` optimiser steps, log and begin anew."""
        if self._step % self._log_every:
            return
        tokens = torch.as_tensor(self._tokens, device=pl_module.device)
        total = float(trainer.strategy.reduce(tokens, reduce_op="sum"))
        now = time.perf_counter()
        pl_module.log("train/tokens_per_second", total / (now - self._start))
        self._tokens, self._start = 0, now
