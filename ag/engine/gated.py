"""A layer of the cache where the flags of a gate say what stays: query j sees token t when t is flagged or recent."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.engine.attend import attend_one
from ag.engine.layer import EvictionLayer, Step
from ag.engine.policy import Policy
from ag.engine.positions import Original
from ag.gates.gate import AttentionGates
from ag.kernels.gated_prefill import gated_prefill


class GatedLayer(EvictionLayer):
    """One layer with a gate, under a policy without a budget."""

    gates: AttentionGates

    def __init__(self, policy: Policy, rotation: Original, gates: AttentionGates) -> None:
        super().__init__(policy, rotation, gates)
        self.gate_type, self.recent = torch.bool, gates.config.recent_tokens

    def _attend(self, step: Step) -> None:
        """Attend to what is flagged or recent; in a prompt that is read densely to everything."""
        assert self.store is not None
        dense = self._dense_prompt(step)
        if step.fresh and not step.now.gaps:
            step.out = step.call.dense(step.now.valid, step.now.left_padded) if dense else self._sparse(step)
        elif self._one_by_one(step):
            step.out = attend_one(step.unrotated, self.store)
        else:
            step.out = self._attend_held(step, recent=0 if dense else self.gates.config.recent_tokens)

    def _retain(self, step: Step) -> None:
        """Do nothing: what goes leaves with what is stored."""

    # ---- what the stages ask

    def _said(self, step: Step) -> Tensor | None:
        """Return the flags ``[B, Hkv, T]`` of the new tokens, 1 where they stay anyway; None: not asked, all stay."""
        config = self.gates.config
        if step.logits is None:
            return None
        flags, stays = self.gates.flags(step.logits), step.now.stays(step.now.ranks, step.now.lowest_rank)
        if stays is not None:
            flags = flags | stays[:, None]
        if step.now.lowest_rank < config.sink_tokens:
            flags = flags | (step.now.ranks < config.sink_tokens)[:, None]
        step.flags = flags
        return flags

    def _dense_prompt(self, step: Step) -> bool:
        return step.now.reading and self.gates.config.prefill == "dense"

    def _closes(self, step: Step) -> bool:
        """Tell whether later queries of a prompt see no more than those behind it."""
        return step.now.ends_prompt if self._dense_prompt(step) else True

    def _sparse(self, step: Step) -> Tensor:
        """Attend among the tokens of a prompt, as they come with their flags."""
        call, config, flags = step.call, self.gates.config, step.flags
        assert flags is not None
        return gated_prefill(
            *(call.q, call.k, call.v, flags),
            key_valid=step.now.valid,
            scaling=call.scaling,
            recent=config.recent_tokens,
            sinks=config.sink_tokens,
            window=call.window,
            softmax=call.softmax,
        )
