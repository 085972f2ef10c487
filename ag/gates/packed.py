"""Weights of an export in eight bits: each matrix as int8 with one float32 scale for each of its rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

LARGEST = 127
SCALE = ".scale"


def pack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round each matrix to 127 steps of its row's largest absolute value; other tensors stay as they are.

    Args:
        tensors: finite float32 tensors.
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            packed[name] = tensor
            continue
        scale = tensor.abs().amax(1) / LARGEST
        steps = tensor / scale.where(scale > 0, 1.0)[:, None]  # a row of zeros has scale 0
        packed[name], packed[name + SCALE] = steps.round().to(torch.int8), scale
    return packed


def unpack(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the float32 tensors that :func:`pack` rounded."""
    return {
        name: packed[name + SCALE][:, None] * tensor if name + SCALE in packed else tensor
        for name, tensor in packed.items()
        if not name.endswith(SCALE)
    }
