"""Guards: an error at NaN and infinity, a warning about gates that are always open or always shut."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from ag.callbacks.checkpoint_files import checkpoints
from ag.config.loss import LossConfig, MeanGateConfig
from ag.training.objectives import loss_names
from ag.training.sharded import gather_tensor

GRADIENTS = {"gates": "gradient norm of the gates", "lora": "gradient norm of LoRA"}
HINTS = {  # of gates whose mean has a target
    "kept": "lower loss.beta or gate.bias, raise loss.alpha or optim.gate_lr, or begin with warmup.regress_steps",
    "evicted": "raise loss.beta or gate.bias, or lower loss.alpha or optim.gate_lr",
}


class NonFiniteError(RuntimeError):
    """A loss or a gradient is NaN or infinite; the weights are unchanged."""


class FiniteGuard(Callback):
    """Stops a run before an optimiser step with a NaN or an infinity.

    The losses of all accumulated batches and the gradient norms are read once a step, after the gradients were
    averaged. The ranks agree: all raise at one step. With 16-mixed precision only a NaN loss counts, because the
    gradient scaler handles infinite gradients.

    Logs ``train/grad_norm_gates`` and ``train/grad_norm_lora``: 2-norms, unscaled, before clipping.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._losses: list[Tensor] = []

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Keep the loss of a batch for the check; reading it here would synchronise with the device every batch."""
        self._losses.append(loss.detach())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """Log the gradient norms, and check them and the losses of this step.

        Raises:
            NonFiniteError: a norm or a loss of any rank is not finite; all ranks raise.
        """
        norms = {}
        for name, parameters in pl_module.trainable().items():
            if gradients := [parameter.grad for parameter in parameters if parameter.grad is not None]:
                norms[name] = gather_tensor(get_total_norm(gradients))
        pl_module.log_dict({f"train/grad_norm_{name}": norm for name, norm in norms.items()})
        losses, self._losses = self._losses, []
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            finite = bool(torch.stack([*losses, *norms.values()]).isfinite().all())
        else:
            finite = not bool(torch.stack(losses).isnan().any())
        if not trainer.strategy.reduce_boolean_decision(finite):
            raise NonFiniteError(self._message(trainer, norms))

    def _message(self, trainer: Trainer, norms: dict[str, Tensor]) -> str:
        names = loss_names(trainer.callback_metrics) | {"train/eviction_loss": "eviction loss"}
        values = {name: trainer.callback_metrics.get(key) for key, name in names.items()}
        values |= {name: norms.get(key) for key, name in GRADIENTS.items()}
        nonfinite = {name: float(x) for name, x in values.items() if x is not None and not torch.isfinite(x)}
        problems = ", ".join(f"{name} is {value}" for name, value in nonfinite.items())
        saved = checkpoints(self._run_dir)
        return (
            f"step {trainer.global_step + 1}: {problems or 'the loss is not finite on another rank'}. "
            f"The weights were not changed; the last checkpoint is {saved[0] if saved else 'none yet'}. "
            "Start a new run with a lower optim.gate_lr or optim.lora_lr, or with trainer.precision=32-true."
        )


class GateCollapse(Callback):
    """Warns once about each layer whose gates kept, or evicted, every token of many consecutive batches.

    Args:
        batches: number of these batches; 0 means no warnings.
        log_every: optimiser steps between checks, each of which synchronises with the device.
    """

    def __init__(self, batches: int, log_every: int) -> None:
        self._batches, self._log_every = batches, log_every
        self._streaks: dict[str, Tensor | int] = {"kept": 0, "evicted": 0}
        self._warned: set[tuple[str, int]] = set()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch; at a log step, warn about the layers that have reached the number."""
        evicted: Tensor | None = pl_module.evicted_in_batch
        if not self._batches or evicted is None:
            return
        for state, share in {"kept": 0, "evicted": 1}.items():
            self._streaks[state] = streak = (self._streaks[state] + 1) * (evicted == share)
            if trainer.global_step % self._log_every:
                continue
            for index in (streak >= self._batches).nonzero().flatten().tolist():
                self._warn(state, pl_module.gates.layer_indices[index], pl_module.config.loss)

    def _warn(self, state: str, layer: int, loss: LossConfig) -> None:
        if (state, layer) not in self._warned:
            self._warned.add((state, layer))
            hint = HINTS[state] if isinstance(loss, MeanGateConfig) else "lower optim.gate_lr"
            text = f"layer {layer}: its gates {state} every token of the last {self._batches} batches: {hint}"
            warnings.warn(text, stacklevel=2)
