"""The callback that writes and removes checkpoints."""

from __future__ import annotations

import math
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from ag.callbacks.checkpoint_files import checkpoints, hard_link, step_of
from ag.callbacks.guards import NonFiniteError
from ag.callbacks.steps import StepCallback
from ag.callbacks.stop import Stopped
from ag.config.sections import CheckpointConfig


class RunCheckpoint(StepCallback, Checkpoint):
    """Saves to `run_dir/checkpoints/step=NNNNNN.ckpt` and keeps `best.ckpt` beside it.

    A checkpoint is written every `every_steps` optimiser steps, after each validation, at the end, after a signal and,
    with one process, after an error other than `NonFiniteError`. The checkpoints at the end, after a signal and after
    an error hold the loop counters from the end of the last optimiser step, or from the start of the validation after
    it. A resumed run therefore repeats only the unfinished step or validation, and a run that ended at
    `trainer.max_steps` continues inside its epoch if `trainer.max_steps` is raised. (Lightning's ModelCheckpoint saves
    either every few steps or after validations, and the counters of the moment: after an error between two accumulated
    batches, a resumed run would lack the gradient of the first.)
    """

    def __init__(self, run_dir: Path, settings: CheckpointConfig) -> None:
        self._folder, self._settings = Path(run_dir) / "checkpoints", settings
        self._best, self._saved_step = math.inf, 0
        #: Loop counters of the last moment from which a run can be resumed.
        self._resumable_counters: dict[str, Any] = {}
        self._save_resumable = False

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far, and the name of its metric."""
        return {"best": self._best, "monitor": self._settings.monitor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value, unless it belongs to another metric."""
        if state_dict.get("monitor", self._settings.monitor) == self._settings.monitor:
            self._best = state_dict["best"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove half-written files of a killed run."""
        if trainer.is_global_zero:
            for partial in self._folder.glob("*.partial"):
                partial.unlink()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start at the step of the checkpoint, or at 0. A run whose patience has ended does not train on."""
        super().on_train_start(trainer, pl_module)
        self._saved_step = self._step
        stopping = trainer.early_stopping_callback
        if stopping is not None:
            stopping.patience = self._settings.patience  # Lightning restores that of the checkpoint
            # Lightning restores the count, and not that the run has ended
            trainer.should_stop |= stopping.wait_count >= stopping.patience
        # after a checkpoint of an epoch's last batch Lightning 2.6 does not count the next epoch, and a second resume
        # would repeat it
        epochs = trainer.fit_loop.epoch_progress
        total = epochs.state_dict()["total"]
        if trainer.fit_loop.restarted_mid_epoch and total["processed"] == total["started"]:
            epochs.increment_ready()
            epochs.increment_started()

    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the loop counters; save if a checkpoint is due."""
        self._resumable_counters = deepcopy(trainer.fit_loop.state_dict())
        if self._settings.every_steps and self._step % self._settings.every_steps == 0:
            self._save(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mark the validation as begun in the copied counters."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        # a resumed run repeats an unfinished validation, which its checkpoint has counted already
        total: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
        total.ready = total.started = total.processed
        self._resumable_counters = deepcopy(trainer.fit_loop.state_dict())
        # Lightning takes a validation with ready > processed for an unfinished one, and repeats it on resume
        begun = self._resumable_counters["epoch_loop.val_loop.batch_progress"]["total"]
        begun["ready"] += 1
        begun["started"] += 1
        if self._saved_step == trainer.global_step:
            self._save(trainer, resumable=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, and keep a copy if the monitored metric is the best so far."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        value = float(trainer.callback_metrics[self._settings.monitor])
        improved = value < self._best
        if improved:
            self._best = value
        path = self._save(trainer)
        if improved and trainer.is_global_zero:
            hard_link(path, self._folder / "best.ckpt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step."""
        if self._saved_step != trainer.global_step:
            self._save(trainer, resumable=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the last complete step; with several ranks only after a signal, as saving needs all of them."""
        together = trainer.world_size == 1 or isinstance(exception, Stopped)
        nothing_new = self._saved_step == trainer.global_step
        # after an exception between the optimiser's step and the end of its batch, the copied counters are too old
        not_resumable = not self._resumable_counters or self._step != trainer.global_step
        if isinstance(exception, NonFiniteError) or not together or nothing_new or not_resumable:
            return
        try:
            self._save(trainer, resumable=True)
        except (OSError, RuntimeError) as error:
            warnings.warn(f"step {trainer.global_step} could not be saved: {error}", stacklevel=2)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Replace the current loop counters by their copy."""
        if self._save_resumable:
            checkpoint["loops"]["fit_loop"] = self._resumable_counters

    def _save(self, trainer: Trainer, resumable: bool = False) -> Path:
        path = self._folder / f"step={trainer.global_step:06d}.ckpt"
        self._save_resumable = resumable
        trainer.save_checkpoint(path, weights_only=False)
        self._saved_step = trainer.global_step
        if trainer.is_global_zero:
            self._prune()
        return path

    def _prune(self) -> None:
        """Remove old checkpoints, and newer checkpoints, which were damaged when the run was resumed."""
        saved = checkpoints(self._folder.parent)
        current = [path for path in saved if step_of(path) <= self._saved_step]
        for path in set(saved) - set(current[: self._settings.keep_last]):
            path.unlink()
