"""The guard against NaN and infinity."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from ag.callbacks.checkpoint_files import checkpoints
from ag.callbacks.gradients import GradientNorms
from ag.training.objectives import loss_names

GRADIENTS = {"gates": "gradient norm of the gates", "lora": "gradient norm of LoRA"}


class NonFiniteError(RuntimeError):
    """A loss or a gradient is NaN or infinite; the weights were not changed by it."""


class FiniteGuard(Callback):
    """Stops a run before the optimiser step that a NaN or an infinity would spoil.

    The losses of all accumulated batches and the gradient norms are read once a step, after the gradients
    were averaged; the ranks agree, so that all of them raise at the same step. With 16-mixed precision
    infinite gradients are left to the gradient scaler (it skips the step and lowers the scale) and only a NaN
    loss counts.
    """

    def __init__(self, gradients: GradientNorms, run_dir: Path) -> None:
        self._gradients = gradients
        self._run_dir = run_dir
        self._losses: list[Tensor] = []

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Keep the loss of a batch for the check (reading it here would wait for the device every batch)."""
        self._losses.append(loss.detach())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Check the losses and the gradients of this step.

        Raises:
            NonFiniteError: on all ranks, when one of them is not finite on any rank.
        """
        losses, self._losses = self._losses, []
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            finite = bool(torch.stack([*losses, *self._gradients.norms.values()]).isfinite().all())
        else:
            finite = not bool(torch.stack(losses).isnan().any())
        if not trainer.strategy.reduce_boolean_decision(finite):
            raise NonFiniteError(self._message(trainer))

    def _message(self, trainer: Trainer) -> str:
        names = loss_names(trainer.callback_metrics) | {"train/eviction_loss": "eviction loss"}
        values = {name: trainer.callback_metrics.get(key) for key, name in names.items()}
        values |= {name: self._gradients.norms.get(key) for key, name in GRADIENTS.items()}
        parts = [
            f"{name} is {float(value)}"
            for name, value in values.items()
            if value is not None and not torch.isfinite(value)
        ]
        saved = checkpoints(self._run_dir)
        what = ", ".join(parts) or "the loss is not finite on another rank"
        return (
            f"step {trainer.global_step + 1}: {what}. "
            f"The weights were not changed; the last checkpoint is {saved[0] if saved else 'none yet'}. "
            "Lower optim.gate_lr or optim.lora_lr, or set trainer.precision=32-true, and continue with "
            f"resume={self._run_dir}."
        )
