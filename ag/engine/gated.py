"""A layer of the cache where the flags of a gate say what stays: query j sees token t when t is flagged or recent."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ag.engine.attend import attend_one
from ag.engine.layer import EvictionLayer, Step
from ag.engine.policy import Policy
from ag.engine.positions import Original
from ag.engine.ring import RingStore
from ag.engine.storage import Rows
from ag.gates.gate import AttentionGates
from ag.kernels.gated_attention import gated_attention
from ag.kernels.gated_prefill import gated_prefill


class GatedLayer(EvictionLayer):
    """One layer with a gate, under a policy without a budget.

    Args:
        policy: of the cache.
        rotation: what keys are rotated by.
        gates: of the model; this layer has one.
    """

    store_type: ClassVar[type[RingStore]] = RingStore
    store: RingStore | None
    gates: AttentionGates

    def __init__(self, policy: Policy, rotation: Original, gates: AttentionGates) -> None:
        super().__init__(policy, rotation, gates)

    def _store(self, step: Step) -> None:
        """Store the new tokens: one of each sequence in the ring, several behind what is held."""
        call, now, store = step.unrotated, step.now, self._storage(step)
        flags = step.flags = self._flags(step)
        if not store.open and not (self._pushes(step) and store.before is None):
            store.settle()
        if self._pushes(step):
            ranks = now.ranks.masked_fill(~now.real, -1) if now.padded else now.ranks
            if flags is None and now.padded:
                flags = torch.ones(call.k.shape[:3], dtype=torch.bool, device=call.k.device)
            store.push(call.k, call.v, ranks, flags)
            return
        store.open = self._dense_prompt(step)
        keep = now.real[:, None] if now.padded else None
        if step.fresh and self._ends(step):
            recent = now.ranks > torch.where(now.real, now.ranks, -1).amax(1, keepdim=True) - store.recent
            assert flags is not None
            keep = now.real[:, None] & (flags | recent[:, None])
        store.append(call.k, call.v, now.ranks, keep, flags)

    def _attend(self, step: Step) -> None:
        """Attend to what is flagged or recent; in a prompt that is read densely to everything."""
        store, dense = self._storage(step), self._dense_prompt(step)
        if step.fresh and dense:
            step.out = self._dense(step)
        elif self._pushes(step) and self.rotation.in_place and not self._windowed(step):
            call = step.unrotated if step.unrotated.window is None else replace(step.unrotated, window=None)
            step.out = attend_one(call, store, step.now.ranks, step.now.seen)
        elif step.fresh:
            step.out = self._sparse(step)
        else:
            step.out = self._attend_held(step, recent=0 if dense else store.recent)

    def _retain(self, step: Step) -> None:
        """Free what no later query sees, where the tokens of this pass are not to be taken back."""
        step.held = None  # the new buffers can have its memory
        if self._ends(step):
            self._storage(step).settle(spare=not step.now.completes_prompt)

    # ---- what the stages ask

    def _storage(self, step: Step) -> RingStore:
        if self.store is None:
            k, config = step.unrotated.k, self.gates.config
            window = step.call.window if config.covers == "all" else None  # else all that follows the prompt stays
            self.store = self.store_type(
                *(k.shape[0], k.shape[1], k, step.unrotated.v), recent=config.recent_tokens, window=window
            )
        return self.store

    def _flags(self, step: Step) -> Tensor | None:
        """Return the flags ``[B, Hkv, T]`` of the new tokens, 1 for sinks; None: the gate was not asked, all stay."""
        config = self.gates.config
        if step.logits is None:
            return None
        flags = self.gates.flags(step.logits)
        return (
            flags if step.now.at_least >= config.sink_tokens else flags | (step.now.ranks < config.sink_tokens)[:, None]
        )

    def _pushes(self, step: Step) -> bool:
        """Whether the pass stores one token that may evict at once."""
        return step.call.q.shape[2] == 1 and not self._dense_prompt(step) and not self._differentiated(step)

    def _windowed(self, step: Step) -> bool:
        """Whether more is held than the model's sliding window lets the newest query see."""
        window = step.call.window
        return window is not None and self._storage(step).window is None and step.now.seen > window

    def _dense_prompt(self, step: Step) -> bool:
        return step.now.reading and self.gates.config.prefill == "dense"

    def _ends(self, step: Step) -> bool:
        """Whether what no later query sees may go after this pass."""
        return step.now.ends_prompt if self._dense_prompt(step) else step.now.reading

    def _sparse(self, step: Step) -> Tensor:
        """Attend among the tokens of a prompt, as they come with their flags."""
        call, now, config = step.call, step.now, self.gates.config
        valid, flags, attend = (now.real if now.padded else None), step.flags, gated_prefill
        assert flags is not None
        if any(x.requires_grad for x in (call.q, call.k, call.v)):
            flags, attend = flags.float(), gated_attention
        return attend(
            *(call.q, call.k, call.v, flags),
            key_valid=valid,
            scaling=call.scaling,
            recent=config.recent_tokens,
            sinks=config.sink_tokens,
            window=call.window,
        )

    def _held(self, step: Step) -> Rows:
        """Return what is held, rows padded; in the order of ranks where slots are places."""
        if self.rotation.in_place:
            return self._storage(step).padded()
        return self.rotation.keys(self._storage(step).ordered())
