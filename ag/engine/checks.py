"""Checks before a cache is made, of policy, model and gates, and before two caches are joined."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from ag.engine.policy import Policy
from ag.errors import BudgetWarning, UserError
from ag.gates.attach import alike, attached_gates, check_geometry, move_to_layers
from ag.gates.gate import AttentionGates
from ag.model.hooks import attentions_of, device_of
from ag.model.projection import output_projection
from ag.model.support import check_one_position_per_token, check_rotations, states_go_on

if TYPE_CHECKING:
    from ag.engine.forward import Forward


def attached(model: nn.Module, policy: Policy) -> AttentionGates:
    """Return the gates attached to a model, for a policy that names none."""
    gates = attached_gates(model)
    if gates is None:
        spec = policy.spec
        raise UserError(
            f"Policy '{spec}': no gates are attached; call ag.attach(model, gates) or name {spec.scorer}:PATH."
        )
    return gates


def fitted(model: nn.Module, gates: AttentionGates, wanting: Policy) -> Policy:
    """Put gates beside the layers of a model, and return the policy as they were trained."""
    check_geometry(model, gates)
    if gates.adapter is not None:
        gates.adapter.check(model, times=1)
    move_to_layers(model, gates)
    if gates.config.scope == "prompt" and wanting.block is not None:
        raise UserError(
            f"{wanting!r}: gates of gate.scope=prompt read a prompt in one forward pass; use the schedule prefill, or "
            "gates of gate.scope=causal."
        )
    first, windowed = gates.config.first_layer, gates.fingerprint["windowed_layers"]
    num_ungated = sum(index not in windowed for index in range(first))
    if num_ungated and wanting.budget is not None:
        warnings.warn(
            f"{wanting!r}: {num_ungated} of {gates.fingerprint['num_layers']} layers have no gate "
            f"(gate.first_layer={first}) and keep all their tokens; the budget is that of the layers with a gate. "
            "Train gates with gate.first_layer=0 for a budget of all layers.",
            BudgetWarning,
            stacklevel=2,
        )
    return wanting.trained_with(gates)


def check_needs(wanting: Policy, decoder: Any) -> None:
    """Refuse a model on several devices, and one that does not show what the scorer of a policy needs."""
    devices = sorted({str(device_of(layer)) for layer in decoder.layers})
    if len(devices) > 1:
        raise UserError(
            f"EvictionCache: layers of the model lie on {', '.join(devices)}: expected one device, as one pool holds "
            "the keys and values of all layers; load the model onto one."
        )
    if wanting.scorer is None:
        return
    if wanting.rereads:
        check_one_position_per_token(decoder, repr(wanting))
        if not states_go_on(decoder):
            raise UserError(
                f"{wanting!r}: a prompt is repeated in passes of several tokens, and {type(decoder).__name__} has "
                "layers that forget in such a pass what they read before it: expected a policy without a repetition; "
                "use another policy."
            )
    if wanting.scorer.needs.rotations:
        check_rotations(decoder, repr(wanting), "Use another policy.")
    for attention in attentions_of(decoder) if wanting.scorer.needs.output_projection else ():
        output_projection(attention)


def check_add(cache: Forward, other: Forward) -> None:
    """Refuse a cache whose sequences cannot be appended."""
    same = (
        ("model", cache.decoder is other.decoder),
        ("policy", cache.policy == other.policy),
        ("gates", alike(cache.gates, other.gates)),
        ("pool", cache.pool is other.pool),
        ("data types", cache.kind is None or other.kind is None or cache.kind[:2] == other.kind[:2]),
    )
    for property_name, fits in same:
        if not fits:
            raise UserError(
                f"add: the caches ({cache.policy!r} and {other.policy!r}) differ in {property_name}: expected two of "
                "one model, policy and gates, made with the same pool=ag.Pool(model, nbytes), and read in one type."
            )
    if other is cache or not len(other.sequences):
        raise UserError("add: expected another cache that has read its prompt; read it first.")
    for each in (cache, other):
        check_one_position_per_token(each.decoder, "add")
        each.check_whole()
        each.sequences.check_positions_skip_padding("add")
        if len(each.sequences) and not each.sequences.ready:
            raise UserError(
                f"add: {each.sequences.num_tokens.tolist()} of {each.sequences.prompt_len.tolist()} tokens of prompts "
                "were read so far: expected all; add the cache after them."
            )
