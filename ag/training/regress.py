"""The warm start, or a whole run, by regression: gates learn statistics of attention, and the model has no gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.gates.gating import TargetPass
from ag.training import losses
from ag.training.gated_loss import Batch, GatedLoss, LossTerms, loss_terms
from ag.training.replay import ReplayLoss
from ag.training.sharded import gather_tensor


class RowRegression(GatedLoss):
    """Regress the gates on the attention of whole rows; see :func:`ag.training.losses.regression_loss`."""

    def loss(self, batch: Batch, step: int) -> LossTerms:
        """Compute the loss of a training batch; see :meth:`GatedLoss.loss`."""
        assert self.gates is not None
        warm = self.config.warmup
        prompts, copied = batch.get("prompt_length"), batch.get("copied")
        observed = TargetPass(self.gates, batch["attention_mask"], prompts, warm.target, copied)
        with torch.no_grad():
            self.run_decoder(batch, observed)
        logits, targets = (torch.stack([*by_layer.values()]) for by_layer in (observed.logits, observed.targets))
        loss = losses.regression_loss(self.gates, logits, targets, observed.has_target(), warm.keep, warm.scale)
        # DistributedDataParallel waits for the adapters' gradients; GatedLM.on_before_optimizer_step drops them
        # (under FSDP2 the sum is a DTensor)
        adapters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        total = loss + 0.0 * sum(gather_tensor(parameter.sum()) for parameter in adapters)
        return loss_terms(loss, {"regress_loss": loss}, *self.gate_measurements(observed))._replace(loss=total)


class PromptRegression(GatedLoss):
    """Regress the gates on KVzip's scores of the prompts of replay; the model reads and repeats each prompt once.

    ``replay`` is the loss after the warm start, whose cached prompts have targets.
    """

    def __init__(self, replay: ReplayLoss) -> None:
        super().__init__(replay.config, replay.model, replay.gates)
        self.replay = replay

    def loss(self, batch: Batch, step: int) -> LossTerms:
        """Compute the loss of a training batch; see :meth:`GatedLoss.loss`."""
        assert self.gates is not None
        warm, lengths = self.config.warmup, batch["prompt_length"]
        prompts = [self.replay.split_row(batch, row)[0] for row in range(len(lengths))]
        logits = _pad([self.replay.gate_logits(prompt) for prompt in prompts])
        targets = _pad([torch.stack([x.targets[layer] for layer in x.hidden]) for x in prompts])
        gating = self.replay.open_gating(logits, lengths)
        repeated = gating.counted() & ~self.unevictable(gating)
        loss = losses.regression_loss(self.gates, logits, targets, repeated, warm.keep, warm.scale)
        return loss_terms(loss, {"regress_loss": loss}, *self.gate_measurements(gating))


def _pad(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows ``[L, Hkv, N]`` of several lengths as ``[L, B, Hkv, T]``; zeros fill shorter rows at the end."""
    longest = max(row.shape[-1] for row in rows)
    return torch.stack([F.pad(row, (0, longest - row.shape[-1])) for row in rows], 1)
