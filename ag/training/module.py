"""The LightningModule: a frozen language model, its gates and its adapters."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from ag.config import Config
from ag.config.loss import DrawnShareConfig, LossConfig, MeanGateConfig, RegressConfig, ReplayConfig
from ag.config.schema import check_steps
from ag.errors import UserError
from ag.gates.calibration import Calibration
from ag.gates.gate import AttentionGates
from ag.training import costs
from ag.training.gated_loss import GatedLoss
from ag.training.regress import PromptRegression, RowRegression
from ag.training.replay import ReplayLoss, ReplayValidation
from ag.training.sharded import shard
from ag.training.share_losses import DrawnShareLoss, MeanGateLoss
from ag.training.validation import Validation

#: The losses by the dataclass of their settings.
LOSSES: dict[type[LossConfig], type[GatedLoss]] = {
    MeanGateConfig: MeanGateLoss,
    DrawnShareConfig: DrawnShareLoss,
    ReplayConfig: ReplayLoss,
    RegressConfig: RowRegression,
}


def make_loss(config: Config, model: nn.Module, gates: AttentionGates | None) -> GatedLoss:
    """Make the loss of a run after its warm start."""
    return LOSSES[type(config.loss)](config, model, gates)


class GatedLM(L.LightningModule):
    """Train gates and adapters by one of LOSSES, after a warm start by regression if the configuration has one.

    Args:
        config: the whole configuration.
        model: causal language model with everything frozen but its adapters.
        gates: gates of the model, or None for the adapter-only baseline.
    """

    def __init__(self, config: Config, model: nn.Module, gates: AttentionGates | None) -> None:
        super().__init__()
        self.config, self.model, self.gates = config, model, gates
        self.strict_loading = False  # checkpoints hold trainable weights only
        self.gated_loss = loss = make_loss(config, model, gates)
        #: The loss of the first ``warmup.regress_steps`` steps. None: the run has no warm start.
        self.warm_start: GatedLoss | None = None
        if config.warmup.regress_steps:
            self.warm_start = (
                PromptRegression(loss) if isinstance(loss, ReplayLoss) else RowRegression(config, model, gates)
            )
        self.validation = ReplayValidation(loss) if isinstance(loss, ReplayLoss) else Validation(loss)
        #: Share of evicted tokens by gated layer ``[L]`` in this rank's last training batch.
        self.evicted_in_batch: Tensor | None = None
        self._sums: dict[str, Tensor] = {}  # sums of measurements over the batches of an optimiser step
        self._biases_set = False
        #: The metrics of the last validation, ``val/...``, with its ``step``; empty before the first.
        self.validated: dict[str, float] = {}

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Set biases by costs if they are due, and seed noise and dropout as an uninterrupted run does."""
        if self.global_step == self.config.warmup.regress_steps and not self._biases_set:
            self._set_biases()
            self._biases_set = True  # saved: after an error in this step the run goes on with these biases
        seed_parts = [self.config.seed, self.current_epoch, batch_idx, self.global_rank]
        torch.manual_seed(int(np.random.SeedSequence(seed_parts).generate_state(1)[0]))

    def on_train_start(self) -> None:
        """Set the learning rates of the first step: the checkpoint's rates fit the run's length when it was saved."""
        self.check_length()
        if self.global_step <= self.config.warmup.regress_steps:
            for optimizer in self.trainer.optimizers:
                for parameter in self.trainable()["lora"]:  # loading under FSDP2 makes a state where there was none
                    optimizer.state.pop(parameter, None)
        for schedule in self.trainer.lr_scheduler_configs:
            for group in schedule.scheduler.optimizer.param_groups:
                group["lr"] = self.learning_rate(group["name"], schedule.scheduler.last_epoch)

    def check_length(self) -> None:
        """Refuse schedules that are longer than the epochs."""
        if self.trainer.max_steps < 0:
            check_steps(self.config, self.trainer.estimated_stepping_batches, "trainer.max_epochs")

    def _set_biases(self) -> None:
        """Set the biases of heads by their costs, if the recipe says so."""
        warm = self.config.warmup
        if warm.rounds and isinstance(self.gated_loss, ReplayLoss):
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            num_rows = self.trainer.world_size if self.trainer.fast_dev_run else warm.rows  # type: ignore[attr-defined]
            batches = [{name: x.to(self.device) for name, x in row.items()} for row in data.first_rows(num_rows)]
            with self.trainer.precision_plugin.forward_context():  # as in a training step
                costs.fit_bias_offsets(self.gated_loss, batches, warm.rounds)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch, and log the means over the batches of this optimiser step so far."""
        warms_up = self.global_step < self.config.warmup.regress_steps
        loss = self.warm_start if warms_up and self.warm_start is not None else self.gated_loss
        terms = loss.loss(batch, self.global_step)
        self.evicted_in_batch = terms.evicted
        accumulate = self.config.trainer.accumulate
        microbatch = batch_idx % accumulate
        self._log_means(terms.values, microbatch)
        if accumulate == 1:
            return terms.loss
        # A step has `accumulate` batches, the last of an epoch fewer: Lightning divides by trainer.accumulate even then
        return terms.loss * (accumulate / min(accumulate, self.trainer.num_training_batches - batch_idx + microbatch))

    def _log_means(self, values: dict[str, Tensor], microbatch: int) -> None:
        """Log the means over the first batches of this optimiser step, of which batch ``microbatch`` has ``values``."""
        for name in self._sums.keys() - values.keys():  # metrics of the regression that has ended
            self._remove_metric(name)
        for name, value in values.items():
            in_progress_bar = name in ("evicted", "regress_loss", f"{self.config.loss.objective}_loss")
            self._sums[name] = self._sums[name] + value if microbatch else value
            mean = (self._sums[name] / (microbatch + 1)).to(self.device)  # NCCL averages no tensor of the host
            self.log(f"train/{name}", mean, batch_size=1, sync_dist=True, prog_bar=in_progress_bar)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the adapters' zero gradients in the warm start, so that Adam counts their steps from its end."""
        if self.global_step < self.config.warmup.regress_steps:
            for parameter in self.trainable()["lora"]:
                parameter.grad = None

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Measure a batch under hard flags."""
        self.validation.update(batch, keep_samples=batch_idx == 0)

    def on_validation_epoch_start(self) -> None:
        """Drop the flags of the previous validation."""
        self.validation.sample_flags = []

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics."""
        values = {f"val/{name}": value for name, value in self.validation.compute().items()}
        self.log_dict(values, prog_bar=False)
        self.validated = {"step": self.global_step} | {name: float(value) for name, value in values.items()}
        self.log("step", float(self.global_step - 1))  # Lightning counts steps from 0, and one too far after training
        self.validation.reset()

    def configure_model(self) -> None:
        """Divide the model over the ranks when the strategy is FSDP2."""
        if self.device_mesh is not None:
            shard(self.model, self.gates, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        """Return AdamW with one group for the gates and one for the adapters, and their schedule."""
        optim = self.config.optim
        trained = {name: parameters for name, parameters in self.trainable().items() if parameters}
        # the schedule returns whole learning rates, so the optimiser's own factor is 1
        optimizer = torch.optim.AdamW(
            [{"params": parameters, "lr": 1.0, "name": name} for name, parameters in trained.items()],
            betas=(optim.beta1, optim.beta2),
            weight_decay=optim.weight_decay,
        )
        rates: list[Callable[[int], float]] = [partial(self.learning_rate, name) for name in trained]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def learning_rate(self, group: str, step: int) -> float:
        """Return the learning rate of ``gates`` or ``lora`` at an optimiser step of the run.

        The regression warm start is one cycle for the gates (linear up over its first 30 %, cosine down to 0 in its
        last step) and 0 for the adapters. Each group then warms up linearly to its peak, and keeps it or falls along a
        cosine to 0.
        """
        optim, warm = self.config.optim, self.config.warmup
        if step < warm.regress_steps:
            share = (step + 1) / warm.regress_steps
            rise = min(share / 0.3, 1.0)
            fall = 0.5 * (1 + math.cos(math.pi * max(share - 0.3, 0.0) / 0.7))
            return warm.lr * min(rise, fall) if group == "gates" else 0.0
        peak = optim.gate_lr if group == "gates" else optim.lora_lr
        step -= warm.regress_steps
        if step < optim.warmup_steps:
            return peak * (step + 1) / optim.warmup_steps
        step -= optim.warmup_steps
        # Not at step 0: counting the steps makes the data loader, and Lightning restores its position after
        # configure_optimizers.
        if optim.schedule == "constant" or step == 0:
            return peak
        total = self.trainer.estimated_stepping_batches - warm.regress_steps - optim.warmup_steps
        return peak * 0.5 * (1 + math.cos(math.pi * min(step / max(total, 1), 1.0)))

    def trainable(self) -> dict[str, list[nn.Parameter]]:
        """Return the trained parameters of the groups ``gates`` and ``lora``."""
        gates = [] if self.gates is None else [p for p in self.gates.parameters() if p.requires_grad]
        return {"gates": gates, "lora": [p for p in self.model.parameters() if p.requires_grad]}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save only trained weights, with the metrics and the boundaries of the last validation."""
        names = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if name in names}
        if self.gates is not None and self.gates.calibration is not None:
            checkpoint["calibration"] = self.gates.calibration.record()
        checkpoint["validated"] = self.validated
        checkpoint["biases_set"] = self._biases_set

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read the last validation, or raise a ``UserError`` if the checkpoint lacks trained weights of this run."""
        names = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        mismatched = sorted(names ^ set(checkpoint["state_dict"]))
        if mismatched:
            raise UserError(
                f"The checkpoint does not fit this run: {len(mismatched)} tensors are missing or unknown, the first "
                f"being {mismatched[0]}; resume with the same recipe."
            )
        self._biases_set = checkpoint.get("biases_set", False)
        self.load_validation(checkpoint)

    def load_validation(self, checkpoint: dict[str, Any]) -> None:
        """Take the metrics and the boundaries of the last validation from a checkpoint."""
        self.validated = checkpoint.get("validated", {})
        table = checkpoint.get("calibration")
        if self.gates is not None:
            self.gates.calibration = None if table is None else Calibration(**table)

    def _remove_metric(self, name: str) -> None:
        """Remove a metric of training from the log; Lightning would repeat its last value until the epoch ends."""
        del self._sums[name]
        if self._trainer is not None and self.trainer._results is not None:
            self.trainer._results.pop(f"training_step.train/{name}", None)
            self.trainer.callback_metrics.pop(f"train/{name}", None)
