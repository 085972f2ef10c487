"""The losses of whole rows: an objective with a target of the mean gate, or under a share sampled for each batch."""

from __future__ import annotations

import torch
from torch import nn

from ag.config import Config
from ag.config.loss import DrawnShareConfig, MeanGateConfig
from ag.gates.gate import AttentionGates
from ag.training import losses
from ag.training.gated_loss import Batch, GatedLoss, LossTerms, loss_terms


class MeanGateLoss(GatedLoss):
    """Compute ``objective + alpha * |mean gate - beta|`` (Attention-Gate, section 3.5)."""

    def __init__(self, config: Config, model: nn.Module, gates: AttentionGates | None) -> None:
        super().__init__(config, model, gates)
        assert isinstance(config.loss, MeanGateConfig)
        self.target = config.loss

    def loss(self, batch: Batch, step: int) -> LossTerms:
        """Compute the loss of a training batch; see :meth:`GatedLoss.loss`."""
        target, gating = self.target, None if self.gates is None else self.gating(batch)
        hidden = self.run_decoder(batch, gating)
        teacher = self.teacher(batch) if self.objective.needs_teacher else None
        loss = self.objective_loss(batch, hidden, teacher)
        values = {f"{target.objective}_loss": loss}
        if gating is None:
            return loss_terms(loss, values)
        measured, evicted = self.gate_measurements(gating)
        beta = self.beta(step)
        values["eviction_loss"] = losses.eviction_loss(measured[f"gate_mean_{target.mean}"], beta)
        loss = loss + target.alpha * values["eviction_loss"]
        if target.anneal_steps:
            values["beta"] = torch.tensor(beta)
        return loss_terms(loss, values, measured, evicted)

    def beta(self, step: int) -> float:
        """Return the target of the mean gate at an optimiser step of the run.

        It falls linearly from 1, at the first step after the warm start, to ``loss.beta``, ``loss.anneal_steps`` later.
        """
        target, step = self.target, step - self.config.warmup.regress_steps
        progress = min(step / target.anneal_steps, 1.0) if target.anneal_steps else 1.0
        return target.beta + (1.0 - target.beta) * (1.0 - progress)


class DrawnShareLoss(GatedLoss):
    """Compute the objective under flags that keep a share, sampled for each batch, of the batch's tokens."""

    def __init__(self, config: Config, model: nn.Module, gates: AttentionGates | None) -> None:
        super().__init__(config, model, gates)
        assert isinstance(config.loss, DrawnShareConfig)
        self.shares = config.loss.share_low, config.loss.share_high

    def loss(self, batch: Batch, step: int) -> LossTerms:
        """Compute the loss of a training batch; see :meth:`GatedLoss.loss`."""
        low, high = self.shares
        share = low + (high - low) * torch.rand(())
        dense, teacher = self.open_pass(batch)
        gating = self.gating(batch, boundary=dense.boundary_of(float(share)))
        loss = self.objective_loss(batch, self.run_decoder(batch, gating), teacher)
        values = {"share": share, f"{self.config.loss.objective}_loss": loss}
        return loss_terms(loss, values, *self.gate_measurements(gating))
