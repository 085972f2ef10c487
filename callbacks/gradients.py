"""Gradient norms of gates and adapters, before clipping."""

from __future__ import annotations

from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from ag.training.sharded import whole


class GradientNorms(Callback):
    """Logs `train/grad_norm_gates` and `train/grad_norm_lora`: total 2-norms, unscaled, before clipping.

    Attributes:
        norms: the scalars of the current optimiser step; a group without gradients is absent. With DDP they
            are the norms of the averaged gradients, the same on every rank.
    """

    def __init__(self) -> None:
        self.norms: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """Compute and log the norms."""
        self.norms = {}
        for name, parameters in pl_module.trainable().items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if gradients:
                self.norms[name] = whole(get_total_norm(gradients))
        pl_module.log_dict({f"train/grad_norm_{name}": norm for name, norm in self.norms.items()})
