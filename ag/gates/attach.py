"""Gates attached to a model."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.model.geometry import fingerprint
from ag.model.hooks import Attachment, attentions_of, decoder_of, device_of, instrument, restore
from ag.model.support import check_attention


def attach(model: nn.Module, gates: AttentionGates) -> None:
    """Attach gates to a model, for training and for ``EvictionCache(model, "gates")``.

    Without a cache of this library and outside training the model computes what it did before, at the same cost.

    Args:
        model: a Hugging Face causal language model, plain or PEFT-wrapped.
        gates: made for a model of the same geometry; each layer's gate moves to that layer's device.

    Raises:
        UnsupportedModelError: (a TypeError) when the model class cannot take a custom attention function.
        UserError: (a ValueError) when gates are attached already or were made for another geometry.
    """
    check_attention(model)
    decoder = decoder_of(model)
    attachment = getattr(decoder, "_ag_attachment", None)
    if attachment is not None and attachment.gates is not None:
        raise UserError("The model has gates attached already; call ag.detach(model) first.")
    check_geometry(model, gates)
    move_to_layers(model, gates)
    instrument(model).gates = gates


def attached_gates(model: nn.Module) -> AttentionGates | None:
    """Return the gates that :func:`attach` attached, or None."""
    attachment: Attachment | None = getattr(decoder_of(model), "_ag_attachment", None)
    return None if attachment is None else cast("AttentionGates | None", attachment.gates)


def check_geometry(model: nn.Module, gates: AttentionGates) -> None:
    """Raise ``ValueError`` when gates were made for a model of another shape."""
    ours, theirs = gates.fingerprint, fingerprint(decoder_of(model).config)
    wrong = [f"{name} {ours[name]} (the model has {theirs[name]})" for name in ours if ours[name] != theirs[name]]
    if wrong:
        raise UserError(f"The gates were made for another model: {', '.join(wrong)}.")


def move_to_layers(model: nn.Module, gates: AttentionGates) -> None:
    """Move each gate to the device of the layer whose input it reads."""
    attentions = attentions_of(decoder_of(model))
    for index in gates.layer_indices:
        source = attentions[index - gates.config.layer_offset]
        gates.layers[str(index)].to(device_of(source))


def detach(model: nn.Module) -> None:
    """Undo all changes of this library to a model, :func:`attach` among them."""
    restore(model)


def alike(one: AttentionGates | None, other: AttentionGates | None) -> bool:
    """Whether two gates are one object, or have equal configurations and weights."""
    if one is other:
        return True
    if one is None or other is None or one.config != other.config:
        return False
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in mine.items())
