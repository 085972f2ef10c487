"""The loss of a batch under gates, and measurements of its pass: no optimiser, no trainer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ag.config import Config
from ag.errors import UserError
from ag.gates.adapters import base_change
from ag.gates.gate import AttentionGates
from ag.gates.gating import Gating, Observing
from ag.kernels.gated_attention.masks import sink_mask
from ag.model.base import without_dropout
from ag.model.hooks import instrument
from ag.model.structure import decoder_of
from ag.training import losses
from ag.training.objectives import REGRESS, objective
from ag.training.reconstruction_targets import ReconstructionTargets
from ag.training.sharded import gather_tensor

Batch = dict[str, Tensor]


class LossTerms(NamedTuple):
    """A loss and its terms."""

    loss: Tensor
    #: Without gradient, by name: ``lm_loss``, ``eviction_loss``, ``gate_mean_soft``, ``evicted``, ... , ``loss``.
    values: dict[str, Tensor]
    #: Share of evicted tokens by gated layer ``[L]``, on this rank and without sinks. None: no gates.
    evicted: Tensor | None = None


class GatedLoss:
    """Compute ``objective + alpha * |mean gate - beta|``, or the objective under a share sampled for each batch.

    Args:
        config: ``loss`` and ``warmup`` are read.
        model: causal language model, plain or PEFT-wrapped.
        gates: gates of the model, or None for the adapter-only baseline.
    """

    def __init__(self, config: Config, model: nn.Module, gates: AttentionGates | None) -> None:
        self.config, self.model, self.gates = config, model, gates
        instrument(model)
        if gates is not None:
            without_dropout(model)
        self.objective = objective(config.loss.objective)
        if config.loss.draws_share or self.objective.needs_teacher:
            self._check_teacher()

    def _check_teacher(self) -> None:
        """Refuse an adapter that has changed the base model itself: disabling it would not restore the base."""
        adapters: dict[str, Any] = getattr(self.model, "peft_config", {})
        for name, adapter in adapters.items():
            if change := base_change(vars(adapter)):
                loss = self.config.loss
                need = f"share_high={loss.share_high}" if loss.draws_share else f"objective={loss.objective}"
                raise UserError(
                    f"loss.{need} compares with the base model, which the adapter {name!r} with {change} has changed: "
                    "expected a start beside the base, such as init_lora_weights=True; or set loss.objective=lm "
                    "without drawn shares."
                )

    def regresses(self, step: int) -> bool:
        """Whether an optimiser step of the run trains by regression, without eviction."""
        return self.config.loss.objective == REGRESS or step < self.config.warmup.regress_steps

    def train(self, batch: Batch, step: int) -> LossTerms:
        """Compute the loss of a training batch.

        Args:
            batch: as :class:`ag.data.collate.Collator` makes it.
            step: optimiser steps of the run before this one.
        """
        return self._regression(batch) if self.regresses(step) else self._objective(batch, step)

    def beta(self, step: int) -> float:
        """Return the target of the mean gate at an optimiser step of the run.

        It falls linearly from 1, at the first step after the warm start, to ``loss.beta``, ``loss.anneal_steps`` later.
        """
        loss, step = self.config.loss, step - self.config.warmup.regress_steps
        progress = min(step / loss.anneal_steps, 1.0) if loss.anneal_steps else 1.0
        return loss.beta + (1.0 - loss.beta) * (1.0 - progress)

    def run_decoder(self, batch: Batch, gating: Gating | None = None) -> Tensor:
        """Run the decoder; returns the final hidden states ``[B, T, d]``."""
        if gating is None and "document_start" in batch:
            gating = Gating(None, batch["attention_mask"], first=batch["document_start"])
        keywords = {} if gating is None else {"gating": gating}
        mask = None if gating is not None else batch["attention_mask"]
        output = decoder_of(self.model)(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False, **keywords)
        states: Tensor = output.last_hidden_state
        return states

    @torch.no_grad()
    def teacher(self, batch: Batch, gating: Gating | None = None) -> Tensor:
        """Return the hidden states of the model with open gates and without adapters."""
        disable = getattr(self.model, "disable_adapter", nullcontext)
        with disable():
            return self.run_decoder(batch, gating)

    def token_losses(self, batch: Batch, hidden: Tensor, teacher: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the objective of each token that carries loss; returns the losses ``[N]`` and their rows ``[N]``."""
        chunk = self.config.loss.chunk_tokens
        return self.objective.tokens(self.model, hidden, teacher, batch["labels"], chunk)

    def gating(self, batch: Batch, **options: Any) -> Gating:
        """Return the :class:`Gating` of a batch, with more options."""
        assert self.gates is not None
        documents = batch.get("document_start")
        return Gating(self.gates, batch["attention_mask"], batch.get("prompt_length"), first=documents, **options)

    def evicted(self, gating: Gating) -> Tensor:
        """Return ``[L, B, Hkv, T']`` bool: the tokens that gates evict as soon as they are no longer recent."""
        assert self.gates is not None
        kept = torch.stack([self.gates.flags(logits) for logits in gating.logits.values()])
        return ~kept & ~self.unevictable(gating)[None, :, None]

    def unevictable(self, gating: Gating) -> Tensor:
        """Return ``[B, T']`` bool: the sinks, the first tokens of a prompt or document, which no gate evicts."""
        assert self.gates is not None
        prompt, (batch, length) = gating.prompt, gating.prompt.shape
        mask = sink_mask(prompt, self.gates.config.sink_tokens, batch, length, prompt.device, gating.first)
        return mask[:, : gating.counted().shape[1]]

    def over_all_layers(self, evicted: Tensor) -> Tensor:
        """Convert a share over gated layers to a share over all layers of the model."""
        assert self.gates is not None
        return evicted * (len(self.gates.layers) / int(self.gates.fingerprint["num_layers"]))

    def _objective(self, batch: Batch, step: int) -> LossTerms:
        config, values = self.config.loss, dict[str, Tensor]()
        boundary, teacher = None, None
        if config.draws_share:
            values["share"] = config.share_low + (config.share_high - config.share_low) * torch.rand(())
            dense = self.gating(batch, open=True)
            teacher = self.teacher(batch, dense)
            boundary = dense.boundary_of(float(values["share"]))
        gating = self.gating(batch, boundary=boundary) if self.gates is not None else None
        hidden = self.run_decoder(batch, gating)
        if teacher is None and self.objective.needs_teacher:
            teacher = self.teacher(batch)
        labels = batch["labels"]
        sampled = batch | {"labels": losses.sample_labels(labels, config.sampled_tokens)}
        loss = losses.sample_mean(*self.token_losses(sampled, hidden, teacher), labels)
        values[f"{config.objective}_loss"] = loss
        if gating is None or self.gates is None:
            return loss_terms(loss, values)
        means = losses.gate_means(self.gates, gating)
        if boundary is None:
            beta = self.beta(step)
            values["eviction_loss"] = losses.eviction_loss(means[config.mean], beta)
            loss = loss + config.alpha * values["eviction_loss"]
            if config.anneal_steps:
                values["beta"] = torch.tensor(beta)
        return loss_terms(loss, values, *self._gate_measurements(gating, means))

    def _regression(self, batch: Batch) -> LossTerms:
        assert self.gates is not None
        warm = self.config.warmup
        prompts, copied = batch.get("prompt_length"), batch.get("copied")
        observed: Observing
        if warm.target == "reread":
            observed = ReconstructionTargets(self.model, self.gates, batch["attention_mask"])
        else:
            observed = Observing(self.gates, batch["attention_mask"], prompts, warm.target, copied)
        with torch.no_grad():
            self.run_decoder(batch, observed)
        loss = losses.regression_loss(self.gates, observed, warm.keep, warm.scale)
        values = {"regress_loss": loss}
        # DistributedDataParallel waits for the adapters' gradients
        adapters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        total = loss + 0.0 * sum(gather_tensor(parameter.sum()) for parameter in adapters)
        measurements = self._gate_measurements(observed, losses.gate_means(self.gates, observed))
        return loss_terms(loss, values, *measurements)._replace(loss=total)

    def _gate_measurements(self, gating: Gating, means: dict[losses.Mean, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Return the gates' measurements over the global batch, and the evicted share by layer on this rank."""
        evicted, counted = self.evicted(gating), gating.counted()
        local_evicted, local_tokens = (evicted & counted[None, :, None]).sum((1, 2, 3)), counted.sum()
        num_evicted, num_tokens = losses.global_sum(torch.stack([local_evicted.sum(), local_tokens]))
        share = num_evicted / (num_tokens * evicted.shape[0] * evicted.shape[2])
        values = {
            "gate_mean_soft": means["soft"],
            "gate_mean_hard": means["hard"],
            "evicted": self.over_all_layers(share),
        }
        local_evictable = (counted & ~self.unevictable(gating)).sum()  # with sinks no share would reach 1
        return values, local_evicted / (local_evictable * evicted.shape[2]).clamp_min(1)


def loss_terms(
    loss: Tensor, values: dict[str, Tensor], gate_values: dict[str, Tensor] | None = None, evicted: Tensor | None = None
) -> LossTerms:
    """Return a loss and its measurements, without gradient."""
    values = values | (gate_values or {}) | {"loss": loss}
    return LossTerms(loss, {name: value.detach() for name, value in values.items()}, evicted)
