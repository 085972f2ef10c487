"""A warning when the gates of a layer no longer decide anything."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

HINTS = {
    "open": "lower loss.beta or gate.bias, raise loss.alpha or optim.gate_lr, or begin with warmup.regress_steps",
    "shut": "raise loss.beta or gate.bias, or lower loss.alpha or optim.gate_lr",
}


class GateCollapse(Callback):
    """Warns, once for each layer, when its gates were all open or all shut on every token for many batches.

    Args:
        batches: number of consecutive batches; 0: never.
        log_every: optimiser steps between checks of the counts; a check waits for the device.
    """

    def __init__(self, batches: int, log_every: int) -> None:
        self._batches, self._log_every = batches, log_every
        self._streaks: dict[str, Tensor] = {}
        self._warned: set[tuple[str, int]] = set()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch; at a log step, warn of the layers that have reached the number."""
        evicted: Tensor | None = pl_module.evicted_in_batch
        if not self._batches or evicted is None:
            return
        for name, is_so in {"open": evicted == 0, "shut": evicted == 1}.items():
            streak = self._streaks.get(name)
            streak = torch.zeros_like(evicted) if streak is None else streak
            self._streaks[name] = (streak + 1) * is_so
        if trainer.global_step % self._log_every == 0:
            for name, streak in self._streaks.items():
                for index in (streak >= self._batches).nonzero().flatten().tolist():
                    self._warn(name, pl_module.gates.layer_indices[index])

    def _warn(self, name: str, layer: int) -> None:
        if (name, layer) in self._warned:
            return
        self._warned.add((name, layer))
        what = "kept" if name == "open" else "evicted"
        warnings.warn(
            f"layer {layer}: its gates {what} every token of the last {self._batches} batches: {HINTS[name]}",
            stacklevel=2,
        )
