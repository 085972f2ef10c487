"""Measurements of a validation under hard flags, over its batches and over all ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from ag.config.loss import TargetConfig
from ag.gates.calibration import SHARES, Calibration
from ag.gates.gating import Gating
from ag.training import losses
from ag.training.gated_loss import Batch, GatedLoss
from ag.training.metrics import EvictedShare, LogitCounts, MultipleChoiceAccuracy
from ag.training.objectives import MEASURED

SAMPLES = 4  # rows whose flags are kept for the pictures


class Validation(nn.Module):
    """The metrics of a model with gates; ``gated_loss`` measures a batch as training does."""

    def __init__(self, gated_loss: GatedLoss) -> None:
        super().__init__()
        self.gated_loss, self.loss = gated_loss, gated_loss.config.loss
        self.nll = MeanMetric()  # over tokens, for the perplexity
        self.lm_loss, self.objective_mean = MeanMetric(), MeanMetric()  # over samples, as in training
        self.soft, self.hard = MeanMetric(), MeanMetric()
        self.accuracy, self.accuracy_norm = MultipleChoiceAccuracy(), MultipleChoiceAccuracy(normalise=True)
        if gated_loss.gates is not None:
            gates = gated_loss.gates
            self.evicted_share = EvictedShare(len(gates.layers), gates.fingerprint["num_kv_heads"])
            self.logit_counts = LogitCounts()
        #: Share of evicted tokens by gated layer and KV head ``[L, Hkv]``, set by :meth:`compute`.
        self.evicted: Tensor | None = None
        #: Flags ``[L, Hkv, T]`` (True: kept) of the first prompts, for pictures.
        self.sample_flags: list[Tensor] = []

    def update(self, batch: Batch, keep_samples: bool = False) -> None:
        """Measure a batch, and with ``keep_samples`` keep the flags of its first prompts for pictures."""
        gated_loss = self.gated_loss
        gating = None if gated_loss.gates is None else gated_loss.gating(batch, hard=True)
        dense: Gating | None = None
        if self.loss.draws_share:
            dense, teacher = gated_loss.open_pass(batch)
        else:
            teacher = gated_loss.teacher(batch) if gated_loss.objective.needs_teacher else None
        hidden = gated_loss.run_decoder(batch, gating)
        nll, rows = losses.token_nll(gated_loss.model, hidden, batch["labels"], self.loss.chunk_tokens)
        right = torch.ones_like(rows, dtype=torch.bool)
        if "question" in batch:
            keys = ("question", "choice", "target")
            self.accuracy.update(nll, rows, *(batch[key] for key in keys))
            self.accuracy_norm.update(nll, rows, *(batch[key] for key in keys))
            right = ((batch["choice"] == batch["target"]) & (batch["question"] >= 0))[rows]

        def sample_means(values: Tensor) -> Tensor:
            means, has_tokens = losses.row_means(values[right], rows[right], len(batch["labels"]))
            return means[has_tokens]

        if right.any():
            self.nll.update(nll[right])
            self.lm_loss.update(sample_means(nll))
        if self.loss.objective not in MEASURED:
            self.objective_mean.update(sample_means(gated_loss.token_losses(batch, hidden, teacher)[0]))
        if gating is not None:
            self._measure_gates(batch, gating, dense or gating, keep_samples)

    def compute(self) -> dict[str, Tensor]:
        """Return the measurements by name, and set the calibration of the gates."""
        loss = self.lm_loss.compute()
        values: dict[str, Tensor] = {"lm_loss": loss, "perplexity": self.nll.compute().exp()}
        if self.loss.objective not in MEASURED:
            loss = values[f"{self.loss.objective}_loss"] = self.objective_mean.compute()
        if self.accuracy.update_called:  # on every rank, also on a rank without questions
            values["accuracy"] = self.accuracy.compute()
            values["accuracy_norm"] = self.accuracy_norm.compute()
        if self.gated_loss.gates is not None:
            self.evicted = self.evicted_share.compute().float().cpu()
            values["evicted"] = self.gated_loss.over_all_layers(self.evicted.mean())
            values["gate_mean_soft"], values["gate_mean_hard"] = self.soft.compute(), self.hard.compute()
            boundaries = tuple(self.logit_counts.compute().tolist())
            self.gated_loss.gates.calibration = None if math.isnan(boundaries[0]) else Calibration(SHARES, boundaries)
            if isinstance(self.loss, TargetConfig):
                mean = values[f"gate_mean_{self.loss.mean}"]
                loss = loss + self.loss.alpha * losses.eviction_loss(mean, self.loss.beta)
        values["loss"] = loss
        return {name: value.float() for name, value in values.items()}

    def reset(self) -> None:
        """Reset the metrics, but not ``evicted``."""
        for metric in self.modules():
            if isinstance(metric, Metric):
                metric.reset()

    def _measure_gates(self, batch: Batch, gating: Gating, calibrating: Gating, keep_samples: bool) -> None:
        """Count evicted tokens and gate means of a batch; keep flags for the pictures.

        The logits of ``calibrating`` are counted for the boundaries of shares: the pass under flags, or the dense pass
        if training samples shares.
        """
        gates = self.gated_loss.gates
        assert gates is not None
        not_filler = (batch["labels"][:, 1:] != -100).any(1, keepdim=True)
        counted = gating.counted() & not_filler
        evicted = self.gated_loss.evicted(gating)
        self.evicted_share.update(evicted, counted)
        stacked = torch.stack([*gating.logits.values()])
        logits = stacked.movedim(0, -1)[counted[:, None].expand(stacked.shape[1:])]
        if len(logits):
            self.soft.update(gates.probability(logits))
            self.hard.update(gates.flags(logits).float())
        for logits in calibrating.logits.values():
            self.logit_counts.update(logits.mT[counted].flatten())
        if keep_samples:
            first = not_filler[:, 0] if "choice" not in batch else not_filler[:, 0] & (batch["choice"] == 0)
            for row in first.nonzero().flatten()[:SAMPLES].tolist():
                self.sample_flags.append(~evicted[:, row, :, counted[row]].cpu())
