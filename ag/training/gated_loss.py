"""The base class of losses under gates, and measurements of their passes: no optimiser, no trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ag.config import Config
from ag.errors import UserError
from ag.gates.adapters import base_change
from ag.gates.gate import AttentionGates
from ag.gates.gating import Gating
from ag.kernels.gated_attention.masks import sink_mask
from ag.model.base import without_dropout
from ag.model.hooks import instrument
from ag.model.interceptor import Interceptor
from ag.model.structure import decoder_of
from ag.training import losses
from ag.training.objectives import objective

Batch = dict[str, Tensor]


class LossTerms(NamedTuple):
    """A loss and its terms."""

    loss: Tensor
    #: Without gradient, by name: ``lm_loss``, ``eviction_loss``, ``gate_mean_soft``, ``evicted``, ... , ``loss``.
    values: dict[str, Tensor]
    #: Share of evicted tokens by gated layer ``[L]``, on this rank and without sinks. None: no gates.
    evicted: Tensor | None = None


class GatedLoss(ABC):
    """The loss of a batch, with the passes and the measurements that the ways to train have in common.

    Args:
        config: ``loss`` and ``warmup`` are read.
        model: causal language model, plain or PEFT-wrapped.
        gates: gates of the model, or None for the adapter-only baseline.
    """

    def __init__(self, config: Config, model: nn.Module, gates: AttentionGates | None) -> None:
        self.config, self.model, self.gates = config, model, gates
        self._rope_by_text = instrument(model).rope is not None
        if gates is not None:
            without_dropout(model)
        #: The loss of a token; validation measures it too.
        self.objective = objective(config.loss.objective)
        if self.objective.needs_teacher:
            check_teacher(model, config.loss.objective)

    @abstractmethod
    def loss(self, batch: Batch, step: int) -> LossTerms:
        """Compute the loss of a training batch.

        Args:
            batch: as :class:`ag.data.collate.Collator` makes it.
            step: optimiser steps of the run before this one.
        """

    def run_decoder(self, batch: Batch, gating: Interceptor | None = None) -> Tensor:
        """Run the decoder, under an interceptor if one is given; returns the final hidden states ``[B, T, d]``.

        Where RoPE depends on the length of a text, each row is rotated by its own length in every pass.
        """
        if gating is None and (self._rope_by_text or "document_start" in batch):
            gating = Gating(None, batch["attention_mask"], first=batch.get("document_start"))
        keywords = {"attention_mask": batch["attention_mask"]} if gating is None else {"gating": gating}
        output = decoder_of(self.model)(input_ids=batch["input_ids"], use_cache=False, **keywords)
        states: Tensor = output.last_hidden_state
        return states

    @torch.no_grad()
    def teacher(self, batch: Batch) -> Tensor:
        """Return the hidden states of the model with open gates and without adapters."""
        disable = getattr(self.model, "disable_adapter", nullcontext)
        with disable():
            return self.run_decoder(batch)

    @torch.no_grad()
    def open_pass(self, batch: Batch) -> tuple[Gating, Tensor | None]:
        """Run the model, with its adapters, under open gates.

        Returns:
            The gating, which has the logits, and :meth:`teacher`'s hidden states if the objective needs them.
        """
        gating = self.gating(batch, open=True)
        hidden = self.run_decoder(batch, gating)
        if not self.objective.needs_teacher:
            return gating, None
        return gating, self.teacher(batch) if hasattr(self.model, "disable_adapter") else hidden

    def token_losses(self, batch: Batch, hidden: Tensor, teacher: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the objective of each token that carries loss; returns the losses ``[N]`` and their rows ``[N]``."""
        chunk = self.config.loss.chunk_tokens
        return self.objective.tokens(self.model, hidden, teacher, batch["labels"], chunk)

    def objective_loss(self, batch: Batch, hidden: Tensor, teacher: Tensor | None) -> Tensor:
        """Return the mean objective of ``loss.sampled_tokens`` tokens; each row of a batch weighs alike."""
        labels = batch["labels"]
        sampled = batch | {"labels": losses.sample_labels(labels, self.config.loss.sampled_tokens)}
        return losses.sample_mean(*self.token_losses(sampled, hidden, teacher), labels)

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
        evictable, (batch, length) = gating.evictable, gating.evictable.shape
        mask = sink_mask(evictable, self.gates.config.sink_tokens, batch, length, evictable.device, gating.first)
        return mask[:, : gating.counted().shape[1]]

    def over_all_layers(self, evicted: Tensor) -> Tensor:
        """Convert a share over gated layers to a share over all layers of the model."""
        assert self.gates is not None
        return evicted * (len(self.gates.layers) / int(self.gates.fingerprint["num_layers"]))

    def gate_measurements(self, gating: Gating) -> tuple[dict[str, Tensor], Tensor]:
        """Return measures of the global batch (gate means have a gradient), and this rank's evicted share by layer."""
        assert self.gates is not None
        evicted, counted = self.evicted(gating), gating.counted()
        local_evicted, local_tokens = (evicted & counted[None, :, None]).sum((1, 2, 3)), counted.sum()
        num_evicted, num_tokens = losses.global_sum(torch.stack([local_evicted.sum(), local_tokens]))
        share = num_evicted / (num_tokens * evicted.shape[0] * evicted.shape[2])
        values = {f"gate_mean_{name}": mean for name, mean in losses.gate_means(self.gates, gating).items()}
        values["evicted"] = self.over_all_layers(share)
        local_evictable = (counted & ~self.unevictable(gating)).sum()  # with sinks no share would reach 1
        return values, local_evicted / (local_evictable * evicted.shape[2]).clamp_min(1)


def loss_terms(
    loss: Tensor, values: dict[str, Tensor], gate_values: dict[str, Tensor] | None = None, evicted: Tensor | None = None
) -> LossTerms:
    """Return a loss and its measurements, without gradient."""
    values = values | (gate_values or {}) | {"loss": loss}
    return LossTerms(loss, {name: value.detach() for name, value in values.items()}, evicted)


def check_teacher(model: nn.Module, objective_name: str) -> None:
    """Refuse an adapter that has changed the base model itself: disabling it would not restore the base."""
    adapters: dict[str, Any] = getattr(model, "peft_config", {})
    for name, adapter in adapters.items():
        if change := base_change(vars(adapter)):
            raise UserError(
                f"loss.objective={objective_name} compares with the base model, which the adapter {name!r} with "
                f"{change} has changed: expected a start beside the base, such as init_lora_weights=True; or set "
                "loss.objective=lm."
            )
