"""The Lightning callbacks of a run: guards, measurements, pictures, checkpoints, progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor

from ag.callbacks.checkpoint import RunCheckpoint
from ag.callbacks.checkpoint_files import AtomicCheckpointIO
from ag.callbacks.guards import FiniteGuard, GateCollapse, NonFiniteError
from ag.callbacks.pictures import Figures, ParameterSummary
from ag.callbacks.progress import progress_bar
from ag.callbacks.steps import Throughput, ValidateAfterSteps
from ag.callbacks.stop import StopOnSignal, Stopped, how_to_continue
from ag.config.sections import CheckpointConfig, TrainerConfig

__all__ = ["AtomicCheckpointIO", "NonFiniteError", "Stopped", "build", "how_to_continue"]


def build(
    trainer: TrainerConfig, checkpoint: CheckpointConfig, run_dir: Path, stop_signal: Callable[[], int] | None = None
) -> list[Callback]:
    """Return the callbacks of a run. Lightning calls :class:`RunCheckpoint` last, so that it saves what others counted.

    `lightning.Trainer` also needs `plugins=[AtomicCheckpointIO()]`. For ``stop_signal`` see :class:`StopOnSignal`.
    """
    callbacks: list[Callback] = [
        ParameterSummary(),
        StopOnSignal(run_dir, stop_signal),
        LearningRateMonitor("step"),
        Throughput(trainer.log_every),
        FiniteGuard(run_dir),
        GateCollapse(trainer.collapse_batches, trainer.log_every),
        Figures(run_dir),
    ]
    if trainer.val_every:
        callbacks.append(ValidateAfterSteps(trainer.val_every))
    if checkpoint.patience:
        stopping = EarlyStopping(checkpoint.monitor, patience=checkpoint.patience, check_on_train_epoch_end=False)
        callbacks.append(stopping)
    return [*callbacks, progress_bar(trainer.log_every, trainer.progress), RunCheckpoint(run_dir, checkpoint)]
