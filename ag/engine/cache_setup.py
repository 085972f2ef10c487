"""The model, policy, gates and pool of a cache, and the checks that they fit each other."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ag.engine.block_pool import BlockPool, Pool
from ag.engine.policy import Policy
from ag.engine.positions import ROTATIONS, KeyRotation
from ag.errors import BudgetWarning, UserError
from ag.gates.attach import attached_gates, check_geometry, move_to_layers
from ag.gates.gate import AttentionGates
from ag.model.geometry import KVHeads, attention_layers, chunk_size, fingerprint, kv_heads, shared_layers
from ag.model.hooks import instrument
from ag.model.projection import output_projection
from ag.model.rope import RopeByText
from ag.model.structure import attentions_of, decoder_of, device_of
from ag.model.support import check_attention, check_one_position_per_token, check_rotations, states_go_on


@dataclass(frozen=True, eq=False)
class CacheSetup:
    """The model, policy, gates and pool of a cache. They never change, and forks of a cache share them.

    Attributes:
        policy: of the cache, as its gates were trained.
        decoder: the model's stack of layers.
        gates: of the policy; None means that it has none.
        pool: has the blocks of the keys and values.
        heads: of each layer, the number and the sizes of its KV heads.
        budget_layers: indices of the layers that share the budget: under gates the layers with a gate, else all layers
            without a sliding window.
        rotation: rotates keys and queries again; None means that they stay at their places in the text.
        rope: chooses the frequencies of a text; None means that they do not depend on its length.
        chunk: tokens of the chunks of a text within which some layers attend; None means that no layer does.
        goes_on: whether layers that keep states go on from them in a pass of several tokens.
        kv_reader_counts: of each layer, how many later layers of the model read its keys and values.
    """

    policy: Policy
    decoder: Any
    gates: AttentionGates | None
    pool: BlockPool
    heads: list[KVHeads]
    budget_layers: list[int]
    rotation: KeyRotation | None
    rope: RopeByText | None
    chunk: int | None
    goes_on: bool
    kv_reader_counts: list[int]

    @classmethod
    def of(cls, model: nn.Module, policy: Policy, pool: Pool | None) -> CacheSetup:
        """Check that a model, a policy and a pool fit each other, and hook into the model.

        Args:
            model: causal language model, plain or PEFT-wrapped.
            policy: of the cache; ``gates`` without a path takes those attached to the model.
            pool: None means a pool for this cache alone.

        Raises:
            UnsupportedModelError: when the model class cannot take a custom attention function.
            UserError: when the gates or the pool were made for another model, no gates are attached, or torch makes new
                tensors on another device than the CPU.
        """
        if (default_device := torch.get_default_device()).type != "cpu":
            raise UserError(
                f"torch's default device is {default_device}: expected the CPU, where a cache keeps its lengths and "
                "tables; call torch.set_default_device('cpu') and move the model by model.to(...)."
            )
        gates = policy.gates
        if policy.by_gates and gates is None:
            gates = _attached(model, policy)
        check_attention(model)
        decoder: Any = decoder_of(model)
        if pool is not None:
            pool.check(decoder)
            policy = policy.with_kv_dtype(pool.kv_dtype)
        if gates is not None:
            policy = _fitted(model, gates, policy)
        attachment = instrument(model)  # from now on the model's hooks call the cache's interceptor
        _check_needs(policy, decoder)
        rotation_class = ROTATIONS.get(policy.positions)
        rotation = None if rotation_class is None else rotation_class(decoder)
        config = decoder.config
        heads, windowed = kv_heads(config), fingerprint(config)["windowed_layers"]
        held_type = decoder.dtype if rotation is None else rotation.dtype(decoder.dtype)
        like = torch.empty(0, dtype=held_type, device=device_of(decoder.layers[0]))
        blocks = BlockPool(heads, like, policy.kv_dtype) if pool is None else pool
        if rotation is not None:
            rotation.check(blocks)
        budget_layers = [index for index in range(len(heads)) if index not in windowed]
        if gates is not None and policy.budget is not None:
            budget_layers = gates.layer_indices
        attending = attention_layers(config)
        sources = [attending.index(source) for source in shared_layers(config).values()]
        kv_reader_counts = [sources.count(index) for index in range(len(heads))]
        return cls(
            policy=policy,
            decoder=decoder,
            gates=gates,
            pool=blocks,
            heads=heads,
            budget_layers=budget_layers,
            rotation=rotation,
            rope=attachment.rope,
            chunk=chunk_size(config),
            goes_on=states_go_on(decoder),
            kv_reader_counts=kv_reader_counts,
        )

    @property
    def prompt_sees(self) -> Literal["dense", "sparse", "blocks"]:
        """Which earlier tokens a later token of the prompt sees: all, flagged ones, or the ones that blocks left."""
        if self.policy.block is not None:
            return "blocks"
        if self.gates is not None and self.policy.budget is None:
            return self.gates.config.prefill
        return "dense"


def _attached(model: nn.Module, policy: Policy) -> AttentionGates:
    """Return the gates attached to a model, for a policy that names none."""
    gates = attached_gates(model)
    if gates is None:
        spec = policy.spec
        raise UserError(
            f"Policy '{spec}': no gates are attached; call ag.attach(model, gates) or name {spec.scorer}:PATH."
        )
    return gates


def _fitted(model: nn.Module, gates: AttentionGates, policy: Policy) -> Policy:
    """Put gates beside the layers of a model, and return the policy as they were trained."""
    check_geometry(model, gates)
    if gates.adapter is not None:
        gates.adapter.check(model, times=1)
    move_to_layers(model, gates)
    if gates.config.scope == "prompt" and policy.block is not None:
        raise UserError(
            f"{policy!r}: gates of gate.scope=prompt read a prompt in one forward pass; use the schedule prefill, or "
            "gates of gate.scope=causal."
        )
    first, windowed = gates.config.first_layer, gates.fingerprint["windowed_layers"]
    num_ungated = sum(index not in windowed for index in range(first))
    if num_ungated and policy.budget is not None:
        warnings.warn(
            f"{policy!r}: {num_ungated} of {gates.fingerprint['num_layers']} layers have no gate "
            f"(gate.first_layer={first}) and keep all their tokens; the budget is that of the layers with a gate. "
            "Train gates with gate.first_layer=0 for a budget of all layers.",
            BudgetWarning,
            stacklevel=2,
        )
    return policy.with_trained_protection(gates)


def _check_needs(policy: Policy, decoder: Any) -> None:
    """Refuse a model on several devices, and one that does not show the inputs that the scorer of a policy needs."""
    devices = sorted({str(device_of(layer)) for layer in decoder.layers})
    if len(devices) > 1:
        raise UserError(
            f"EvictionCache: layers of the model lie on {', '.join(devices)}: expected one device, as one pool holds "
            "the keys and values of all layers; load the model onto one."
        )
    if policy.scorer is None:
        return
    if policy.reconstruction_scorer is not None:
        check_one_position_per_token(decoder, repr(policy))
        if not states_go_on(decoder):
            raise UserError(
                f"{policy!r}: a prompt is repeated in passes of several tokens, and {type(decoder).__name__} has "
                "layers that forget in such a pass what they read before it: expected a policy without a repetition; "
                "use another policy."
            )
    if policy.scorer.needs.queries:
        check_rotations(decoder, repr(policy), "Use another policy.")
    for attention in attentions_of(decoder) if policy.scorer.needs.output_projection else ():
        output_projection(attention)
