"""Tokens per second."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor


class Throughput(Callback):
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
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._step = trainer.global_step
        self._start = time.perf_counter()
        self._paused = None

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
        """Count the batch; after every `log_every` optimiser steps, log and begin anew."""
        self._tokens = self._tokens + batch["attention_mask"].sum()
        if trainer.global_step == self._step or trainer.global_step % self._log_every:
            return
        tokens = torch.as_tensor(self._tokens, device=pl_module.device)
        total = float(trainer.strategy.reduce(tokens, reduce_op="sum"))
        now = time.perf_counter()
        pl_module.log("train/tokens_per_second", total / (now - self._start))
        self._tokens, self._start, self._step = 0, now, trainer.global_step
