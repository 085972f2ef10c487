"""Stopping on SIGTERM, SIGUSR1 and Ctrl-C without losing work."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from ag.callbacks.checkpoint_files import checkpoints
from ag.callbacks.steps import StepCallback

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(SystemExit):
    """A signal stopped the run; the exit code is 128 + its number (143 SIGTERM, 138 SIGUSR1, 130 Ctrl-C).

    Only the first process of a machine has that code, further processes end with 0: Lightning's launcher kills the
    first process when another process fails.
    """

    def __init__(self, signum: int, step: int, local_rank: int, run_dir: Path) -> None:
        super().__init__(128 + signum if local_rank == 0 else 0)
        self.signum = signum
        self.step = step
        self.run_dir = run_dir

    def __str__(self) -> str:
        stopped = f"stopped by {signal.Signals(self.signum).name} after step {self.step}"
        return f"{stopped}; {how_to_continue(self.run_dir)}"


def how_to_continue(run_dir: Path) -> str:
    """Return how to continue a stopped run, from its last checkpoint if it has one."""
    if checkpoints(run_dir):
        return f"go on with: python -m ag.fit resume={shlex.quote(str(run_dir))}"
    return f"{run_dir} holds no checkpoint: start the recipe anew"


class StopOnSignal(StepCallback):
    """Finishes the current optimiser step after the first SIGTERM, SIGUSR1 or SIGINT, then raises `Stopped`.

    SLURM sends SIGUSR1 before the time limit (`--signal=SIGUSR1@120`). `RunCheckpoint` saves when it gets the
    exception. A second Ctrl-C interrupts at once. The ranks agree after each optimiser step: a signal to one rank stops
    all. A single process also stops inside a validation. Lightning's handlers are replaced while training and in the
    validation after it: they call collectives inside the handler, which hangs if the ranks do not get the signal
    together, and exit with code 0 or requeue a SLURM job.

    Args:
        run_dir: the run folder, for the message.
        stop_signal: returns the number of a signal from elsewhere, 0 for none; every rank calls it at the same steps.
    """

    def __init__(self, run_dir: Path, stop_signal: Callable[[], int] | None = None) -> None:
        self._run_dir = Path(run_dir)
        self._stop_signal = stop_signal
        self._signum = 0
        self._agreed = 0
        self._replaced: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's signal handlers."""
        super().on_train_start(trainer, pl_module)
        self._replace_handlers()
        if trainer.received_sigterm:  # Lightning has noted a signal that came before
            self._signum, trainer._signal_connector.received_sigterm = signal.SIGTERM, False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Stop if the ranks agreed to; the metrics of the last step are already logged."""
        self._stop_if_agreed(trainer)

    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Agree with the other ranks on a signal."""
        if self._stop_signal is not None:
            self._signum = self._stop_signal() or self._signum
        if trainer.world_size == 1:
            self._agreed = self._signum
        else:
            signum = torch.tensor(self._signum, device=pl_module.device)
            self._agreed = int(trainer.strategy.reduce(signum, reduce_op="max"))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's signal handlers in the validation after the training."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._replace_handlers()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop before a validation if the ranks agreed to."""
        self._stop_if_agreed(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *arguments: Any, **options: Any) -> None:
        """Stop inside a validation, with one process only: several processes may have different numbers of batches."""
        if trainer.world_size == 1:
            self._agreed = self._signum
            self._stop_if_agreed(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Agree with the other ranks after a validation, and stop if no step follows."""
        self.on_step_end(trainer, pl_module)
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._restore_handlers()
            self._stop_if_agreed(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop after the last step too; a resumed run then validates and exports."""
        self._stop_if_agreed(trainer)
        self._restore_handlers()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the earlier handlers."""
        self._restore_handlers()

    def _replace_handlers(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._replaced = {signum: signal.signal(signum, self._on_signal) for signum in SIGNALS}

    def _restore_handlers(self) -> None:
        for signum, handler in self._replaced.items():
            signal.signal(signum, handler)
        self._replaced = {}

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signum = self._signum or signum
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _stop_if_agreed(self, trainer: Trainer) -> None:
        if self._agreed:
            raise Stopped(self._agreed, trainer.global_step, trainer.local_rank, self._run_dir)
