"""The LightningModule: a frozen language model, its gates and its adapters."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from ag.config import Config
from ag.errors import UserError
from ag.gates.calibration import SHARES, Calibration
from ag.gates.gate import AttentionGates
from ag.gates.gating import Dense, Gating, Observing, Open
from ag.kernels.gated_attention.masks import sink_mask
from ag.model.hooks import decoder_of, instrument
from ag.training import losses
from ag.training.metrics import EvictedShare, LogitCounts, MultipleChoiceAccuracy
from ag.training.objectives import MEASURED, REGRESS, objective
from ag.training.sharded import shard, whole

SAMPLES = 4  # validation rows whose flags are kept for the pictures


class GatedLM(L.LightningModule):
    """Train gates and adapters with ``objective + alpha * |mean gate - beta|``, or with shares drawn for each batch.

    Args:
        config: the whole configuration.
        model: causal language model with everything frozen but its adapters.
        gates: gates of the model, or None for the adapter-only baseline.
    """

    def __init__(self, config: Config, model: nn.Module, gates: AttentionGates | None) -> None:
        super().__init__()
        self.config, self.model, self.gates = config, model, gates
        self.strict_loading = False  # checkpoints hold trainable weights only
        instrument(model)
        self.objective = objective(config.loss.objective)
        self.nll, self.objective_mean = MeanMetric(), MeanMetric()
        self.soft, self.hard = MeanMetric(), MeanMetric()
        self.accuracy, self.accuracy_norm = MultipleChoiceAccuracy(), MultipleChoiceAccuracy(normalise=True)
        if gates is not None:
            self.evicted_share = EvictedShare(len(gates.layers), gates.fingerprint["num_kv_heads"])
            self.logit_counts = LogitCounts()
        #: Share of evicted tokens by gated layer and KV head ``[L, Hkv]``, of the last validation.
        self.evicted: Tensor | None = None
        #: Share of evicted tokens by gated layer ``[L]``, of the last training batch of this rank.
        self.evicted_in_batch: Tensor | None = None
        #: Optimiser steps done before the last validation; None before the first.
        self.validated_step: int | None = None
        #: Flags ``[L, Hkv, T]`` (True: kept) and token ids ``[T]`` of the first validation prompts.
        self.sample_flags: list[tuple[Tensor, Tensor]] = []

    def hidden(self, batch: dict[str, Tensor], gating: Dense | None = None) -> Tensor:
        """Run the decoder; returns the final hidden states ``[B, T, d]``."""
        if gating is None and "document_start" in batch:
            gating = Dense(batch["attention_mask"], batch["document_start"])
        keywords = {} if gating is None else {"gating": gating}
        mask = None if gating is not None else batch["attention_mask"]
        output = decoder_of(self.model)(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False, **keywords)
        states: Tensor = output.last_hidden_state
        return states

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Seed the noise of the gates and of dropout by the position in the run, so that resuming repeats it."""
        place = [self.config.seed, self.current_epoch, batch_idx, self.global_rank]
        torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        if self.config.loss.objective == REGRESS or self.global_step < self.config.warmup.regress_steps:
            return self._regress(batch)
        self._forget("train/regress_loss")
        boundary, teacher = self._drawn_boundary(batch) if self.config.loss.draws_share else (None, None)
        gating = self._gating(batch, boundary=boundary) if self.gates is not None else None
        hidden = self.hidden(batch, gating)
        if teacher is None and self.objective.needs_teacher:
            teacher = self._teacher(batch)
        loss = losses.sample_mean(*self._tokens(batch, hidden, teacher), len(batch["input_ids"]))
        self._log(f"train/{self.config.loss.objective}_loss", loss, prog_bar=True, sync_dist=True)
        if gating is not None and self.gates is not None:
            means = losses.gate_means(self.gates, gating)
            if boundary is None:
                beta = self.beta(self.global_step)
                eviction = losses.eviction_loss(means[self.config.loss.mean], beta)
                loss = loss + self.config.loss.alpha * eviction
                self._log("train/eviction_loss", eviction)
                if self.config.loss.anneal_steps:
                    self._log("train/beta", torch.tensor(beta))
            self._log_gates("train", means, self._evicted_flags(gating), gating.counted())
        self._log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Measure a batch under hard flags."""
        gating = None if self.gates is None else self._gating(batch, hard=True)
        dense = self._open(batch) if self.config.loss.draws_share else None
        teacher = None if dense is None and not self.objective.needs_teacher else self._teacher(batch, dense)
        hidden = self.hidden(batch, gating)
        nll, rows = losses.token_nll(self.model, hidden, batch["labels"], self.config.loss.chunk_tokens)
        right = torch.ones_like(rows, dtype=torch.bool)
        if "question" in batch:
            keys = ("question", "choice", "target")
            self.accuracy.update(nll, rows, *(batch[key] for key in keys))
            self.accuracy_norm.update(nll, rows, *(batch[key] for key in keys))
            right = ((batch["choice"] == batch["target"]) & (batch["question"] >= 0))[rows]
        if right.any():
            self.nll.update(nll[right])
        if self.config.loss.objective not in MEASURED:
            self.objective_mean.update(self._tokens(batch, hidden, teacher)[0][right])
        if gating is not None:
            self._measure_gates(batch, gating, dense or gating, keep_samples=batch_idx == 0)

    def on_validation_epoch_start(self) -> None:
        """Drop the flags of the previous validation."""
        self.sample_flags = []

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics."""
        loss = nll = self.nll.compute()
        values: dict[str, Tensor] = {"lm_loss": nll, "perplexity": nll.exp()}
        if self.config.loss.objective not in MEASURED:
            loss = values[f"{self.config.loss.objective}_loss"] = self.objective_mean.compute()
        if self.accuracy.update_called:  # on every rank, also on one that had no question
            values["accuracy"] = self.accuracy.compute()
            values["accuracy_norm"] = self.accuracy_norm.compute()
        if self.gates is not None:
            self.evicted = self.evicted_share.compute().float().cpu()
            values["evicted"] = self._over_all_layers(self.evicted.mean())
            values["gate_mean_soft"], values["gate_mean_hard"] = self.soft.compute(), self.hard.compute()
            boundaries = tuple(self.logit_counts.compute().tolist())
            self.gates.calibration = None if math.isnan(boundaries[0]) else Calibration(SHARES, boundaries)
            if not self.config.loss.draws_share:
                mean = values[f"gate_mean_{self.config.loss.mean}"]
                loss = loss + self.config.loss.alpha * losses.eviction_loss(mean, self.config.loss.beta)
        values["loss"] = loss
        self.log_dict({f"val/{name}": value.float() for name, value in values.items()}, prog_bar=False)
        self.validated_step = self.global_step
        self.log("step", float(self.global_step - 1))  # Lightning counts steps from 0, and one too far after training
        for metric in self.children():
            if isinstance(metric, Metric):
                metric.reset()

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

        The regression warm start is one cycle for the gates (linear up over its first 30 %, cosine down) and 0 for the
        adapters; then each group warms up linearly to its peak and stays, or falls along a cosine to 0.
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
        # Not at step 0: counting the steps makes the data loader, whose first batch depends on what Lightning restores
        # from a checkpoint after it has called configure_optimizers.
        if optim.schedule == "constant" or step == 0:
            return peak
        total = self.trainer.estimated_stepping_batches - warm.regress_steps - optim.warmup_steps
        return peak * 0.5 * (1 + math.cos(math.pi * min(step / max(total, 1), 1.0)))

    def beta(self, step: int) -> float:
        """Return the target of the mean gate at an optimiser step of the run.

        It falls linearly from 1, at the first step after the warm start, to ``loss.beta``, ``loss.anneal_steps`` later.
        """
        loss, step = self.config.loss, step - self.config.warmup.regress_steps
        progress = min(step / loss.anneal_steps, 1.0) if loss.anneal_steps else 1.0
        return loss.beta + (1.0 - loss.beta) * (1.0 - progress)

    def trainable(self) -> dict[str, list[nn.Parameter]]:
        """Return the trained parameters of the groups ``gates`` and ``lora``."""
        gates = [] if self.gates is None else [p for p in self.gates.parameters() if p.requires_grad]
        return {"gates": gates, "lora": [p for p in self.model.parameters() if p.requires_grad]}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep only what is trained, and the boundaries of the last validation."""
        names = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if name in names}
        if self.gates is not None and self.gates.calibration is not None:
            checkpoint["calibration"] = self.gates.calibration.record()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the checkpoint holds exactly what is trained here.

        Raises:
            UserError: when it does not.
        """
        names = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        odd = sorted(names ^ set(checkpoint["state_dict"]))
        if odd:
            raise UserError(
                f"The checkpoint does not fit this run: {len(odd)} tensors are missing or unknown, the first being "
                f"{odd[0]}; resume with the recipe it was made with."
            )

    def _tokens(self, batch: dict[str, Tensor], hidden: Tensor, teacher: Tensor | None) -> tuple[Tensor, Tensor]:
        chunk = self.config.loss.chunk_tokens
        return self.objective.tokens(self.model, hidden, teacher, batch["labels"], chunk)

    @torch.no_grad()
    def _drawn_boundary(self, batch: dict[str, Tensor]) -> tuple[float, Tensor]:
        """Draw the share of flags that are 1; returns the logit they lie above, and the teacher's hidden states."""
        assert self.gates is not None
        low, high = self.config.loss.share_low, self.config.loss.share_high
        share = low + (high - low) * torch.rand(())
        self._log("train/share", share)
        dense = self._open(batch)
        teacher = self._teacher(batch, dense)
        return dense.boundary(float(share)), teacher

    @torch.no_grad()
    def _teacher(self, batch: dict[str, Tensor], gating: Gating | None = None) -> Tensor:
        """Return the hidden states of the model with open gates and without adapters."""
        disable = getattr(self.model, "disable_adapter", nullcontext)
        with disable():
            return self.hidden(batch, gating)

    def _regress(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.gates is not None
        warm = self.config.warmup
        prompts, copied = batch.get("prompt_length"), batch.get("copied")
        observed = Observing(self.gates, batch["attention_mask"], prompts, warm.target, copied)
        with torch.no_grad():
            self.hidden(batch, observed)
        measure = losses.ranking_loss if warm.loss == "ranking" else losses.regression_loss
        loss = measure(self.gates, observed, warm.keep, warm.scale)
        self._log("train/regress_loss", loss, prog_bar=True, sync_dist=True)
        means = losses.gate_means(self.gates, observed)
        self._log_gates("train", means, self._evicted_flags(observed), observed.counted())
        self._log("train/loss", loss, sync_dist=True)
        # every trained parameter takes part, else DistributedDataParallel waits for the adapters' gradients
        return loss + 0.0 * sum(whole(parameter.sum()) for parameter in self.trainable()["lora"])

    def _measure_gates(self, batch: dict[str, Tensor], gating: Gating, ruled: Gating, keep_samples: bool) -> None:
        """Count evicted tokens and gate means of a validation batch; keep flags for the pictures.

        The logits of ``ruled`` are counted for the boundaries of shares: those that training takes its boundary from,
        which is the configuration's in the pass under flags, or that of a drawn share in a dense pass.
        """
        assert self.gates is not None
        not_filler = (batch["labels"][:, 1:] != -100).any(1, keepdim=True)
        counted = gating.counted() & not_filler
        evicted = self._evicted_flags(gating)
        self.evicted_share.update(evicted, counted)
        probability = torch.stack([self.gates.probability(x) for x in gating.logits.values()])
        probability = probability.movedim(0, -1)[counted[:, None].expand(probability.shape[1:])]
        if len(probability):
            self.soft.update(probability)
            self.hard.update((probability > self.gates.config.threshold).float())
        for logits in ruled.logits.values():
            self.logit_counts.update(logits.mT[counted].flatten())
        if keep_samples:
            first = not_filler[:, 0] if "choice" not in batch else not_filler[:, 0] & (batch["choice"] == 0)
            for row in first.nonzero().flatten()[:SAMPLES].tolist():
                ids = batch["input_ids"][row, : counted.shape[1]][counted[row]]
                self.sample_flags.append((~evicted[:, row, :, counted[row]].cpu(), ids.cpu()))

    def _gating(self, batch: dict[str, Tensor], hard: bool = False, boundary: float | None = None) -> Gating:
        assert self.gates is not None
        documents = batch.get("document_start")
        return Gating(self.gates, batch["attention_mask"], batch.get("prompt_length"), hard, documents, boundary)

    def _open(self, batch: dict[str, Tensor]) -> Open:
        assert self.gates is not None
        documents = batch.get("document_start")
        return Open(self.gates, batch["attention_mask"], batch.get("prompt_length"), first=documents)

    def _evicted_flags(self, gating: Gating) -> Tensor:
        """Return ``[L, B, Hkv, T']`` bool: the tokens that are gone once they are no longer recent."""
        assert self.gates is not None
        kept = torch.stack([self.gates.flags(logits) for logits in gating.logits.values()])
        prompt, (batch, length) = gating.prompt, gating.prompt.shape
        sinks = sink_mask(prompt, self.gates.config.sink_tokens, batch, length, prompt.device, gating.first)
        return ~kept & ~sinks[None, :, None, : kept.shape[-1]]

    def _over_all_layers(self, evicted: Tensor) -> Tensor:
        """Turn a share over gated layers into one over all layers of the model."""
        assert self.gates is not None
        return evicted * (len(self.gates.layers) / int(self.gates.fingerprint["num_layers"]))

    def _log_gates(self, stage: str, means: dict[Any, Tensor], evicted: Tensor, counted: Tensor) -> None:
        gone_here, tokens_here = (evicted & counted[None, :, None]).sum((1, 2, 3)), counted.sum()
        self.evicted_in_batch = gone_here / (tokens_here * evicted.shape[2]).clamp_min(1)
        gone, tokens = losses.global_sum(torch.stack([gone_here.sum(), tokens_here]))
        share = gone / (tokens * evicted.shape[0] * evicted.shape[2])
        self._log(f"{stage}/gate_mean_soft", means["soft"])
        self._log(f"{stage}/gate_mean_hard", means["hard"])
        self._log(f"{stage}/evicted", self._over_all_layers(share), prog_bar=True)

    def _forget(self, name: str) -> None:
        """Stop logging a metric that is no longer measured; Lightning repeats its last value until the epoch ends."""
        if self._trainer is not None and self.trainer._results is not None:
            self.trainer._results.pop(f"training_step.{name}", None)
            self.trainer.callback_metrics.pop(name, None)

    def _log(self, name: str, value: Tensor, **keywords: Any) -> None:
        self.log(name, value.detach(), batch_size=1, **keywords)
