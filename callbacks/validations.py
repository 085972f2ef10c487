"""When there are validations."""

from __future__ import annotations

import sys
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class ValidateAfterSteps(Callback):
    """Lets Lightning validate after every so many optimiser steps.

    Lightning counts batches, of which the last step of an epoch may have fewer than others: it would validate, and a
    checkpoint be written, between the batches of a later step, whose gradient a resumed run would not have.

    Args:
        every: optimiser steps.
    """

    def __init__(self, every: int) -> None:
        self._every, self._step = every, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let a run that is resumed know whether its last step was to be validated."""
        self._step = 0
        self._look(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Say whether a step ended here that is to be validated."""
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        due = trainer.global_step != self._step and trainer.global_step % self._every == 0
        self._step = trainer.global_step
        trainer.val_check_batch = 1 if due else sys.maxsize  # of whose multiples the number of the batch is one, or not
