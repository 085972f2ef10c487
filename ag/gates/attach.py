"""Gates attached to a model."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.model.geometry import fingerprint
from ag.model.hooks import LOCK, Attachment, instrument, restore
from ag.model.structure import attentions_of, decoder_of, device_of
from ag.model.support import check_attention


def attach(model: nn.Module, gates: AttentionGates) -> None:
    """Attach gates to a model, for training and for ``EvictionCache(model, "gates")``.

    Outside training and without a cache of this library, outputs and cost of the model do not change.

    Args:
        model: a Hugging Face causal language model, plain or PEFT-wrapped.
        gates: gates for a model of this geometry; each layer's gate moves to that layer's device.

    Raises:
        UnsupportedModelError: (a TypeError) when the model class cannot take a custom attention function.
        UserError: (a ValueError) when gates are attached already or were made for another geometry.
    """
    check_attention(model)
    decoder = decoder_of(model)
    with LOCK:
        attachment = getattr(decoder, "_ag_attachment", None)
        if attachment is not None and attachment.gates is not None:
            raise UserError("The model has gates attached already; call ag.detach(model) first.")
        check_geometry(model, gates)
        move_to_layers(model, gates)
        instrument(model).gates = gates


def attached_gates(model: nn.Module) -> AttentionGates | None:
    """Return the attached gates. None: the model has no gates."""
    attachment: Attachment | None = getattr(decoder_of(model), "_ag_attachment", None)
    return None if attachment is None else cast("AttentionGates | None", attachment.gates)


def check_geometry(model: nn.Module, gates: AttentionGates) -> None:
    """Raise ``UserError`` if gates were made for a model of another geometry."""
    gate_geometry, model_geometry = gates.fingerprint, fingerprint(decoder_of(model).config)
    differing = [name for name in gate_geometry if gate_geometry[name] != model_geometry[name]]
    if differing:
        sizes = (f"{name} {gate_geometry[name]} (the model has {model_geometry[name]})" for name in differing)
        raise UserError(f"The gates were made for another model: {', '.join(sizes)}.")


def move_to_layers(model: nn.Module, gates: AttentionGates) -> None:
    """Move each gate to the device of the layer whose input it reads."""
    attentions = attentions_of(decoder_of(model))
    for index in gates.layer_indices:
        source = attentions[index - gates.config.layer_offset]
        gates.layers[str(index)].to(device_of(source))


def detach(model: nn.Module) -> None:
    """Undo all changes of this library to a model, including :func:`attach`."""
    restore(model)


def same_gates(first: AttentionGates | None, second: AttentionGates | None) -> bool:
    """Whether two gates are one object, or have equal configurations and weights."""
    if first is second:
        return True
    if first is None or second is None or first.config != second.config:
        return False
    left, right = first.state_dict(), second.state_dict()
    return left.keys() == right.keys() and all(torch.equal(x, right[name]) for name, x in left.items())
