"""The rotary embedding of a model's layers, and rotations of queries and keys by it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ag.model.geometry import attention_layers


def rope_of(decoder: Any, layer: int) -> tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], float]:
    """Return the function of a layer from ``x`` and positions ``[B, T]`` to cosines and sines, and their scaling.

    Some models have a RoPE for each type of layers (Gemma 3).
    """
    rotary = decoder.rotary_emb
    if not isinstance(rotary.rope_type, dict):
        return rotary, rotary.attention_scaling
    kind = decoder.config.layer_types[attention_layers(decoder.config)[layer]]
    return partial(rotary, layer_type=kind), getattr(rotary, f"{kind}_attention_scaling")


def rotate(decoder: Any, x: Tensor, positions: Tensor, span: int = 1, layer: int = 0) -> Tensor:
    """Rotate queries or keys by positions, as the model's RoPE does; negative positions undo a rotation.

    Args:
        decoder: the model's stack of layers.
        x: ``[B, H, n, D]``, already scaled as the model's RoPE scales (yarn).
        positions: ``[B or 1, H or 1, n or 1]``, whole or not.
        span: rotate by the mean over this number of positions, beginning with each.
        layer: index of the layer, where layers have several RoPEs.
    """
    apply = sys.modules[type(decoder).__module__].apply_rotary_pos_emb
    positions = positions.expand(len(x), -1, -1)
    steps = (positions[..., None] + torch.arange(span, device=positions.device)).flatten(1)
    rope, scaling = rope_of(decoder, layer)
    cos, sin = (part / scaling for part in rope(x.float(), steps))
    cos, sin = (  # a rotation is linear in both
        part.unflatten(1, (*positions.shape[1:], span)).mean(3).expand(-1, x.shape[1], -1, -1).flatten(0, 1)
        for part in (cos, sin)
    )
    flat = x.float().flatten(0, 1)
    turned: Tensor = apply(flat[:, None], flat[:, None][:, :0], cos, sin)[0]
    return turned.view_as(x).to(x.dtype)
