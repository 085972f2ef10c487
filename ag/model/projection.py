"""Norms of values after a layer's output projection: the size of a token's contribution to the residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ag.errors import UserError

TOKENS = 1024  # tokens projected at once
NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")


def output_projection(attention: nn.Module) -> Any:
    """Return the linear output projection of an attention module, or raise a ``UserError``."""
    named = (getattr(attention, name, None) for name in NAMES)
    project = next((candidate for candidate in named if hasattr(candidate, "in_features")), None)
    if project is None:
        raise UserError(
            f"{type(attention).__name__} has no linear output projection {', '.join(NAMES)}, which this policy needs; "
            "use another policy."
        )
    return project


@torch.no_grad()
def output_weight(attention: nn.Module, heads: int) -> Tensor:
    """Return the output projection of an attention module by query head, ``[H, D, M]`` float32, without its bias.

    A module that is not a plain linear layer (LoRA beside the weight, a quantised weight) is applied to unit vectors.
    """
    project = output_projection(attention)
    if type(project) is nn.Linear and project.weight.device.type != "meta":
        weight = project.weight.float().T
    else:
        example = next(x for x in project.parameters() if x.is_floating_point())
        unit = torch.eye(project.in_features, dtype=example.dtype, device=example.device)
        weight = project(unit).float() - project(unit[:1] * 0).float()
    by_head: Tensor = weight.unflatten(0, (heads, -1))
    return by_head


def projected_norms(v: Tensor, weight: Tensor, order: int) -> Tensor:
    """Return the norms ``[B, H, N]`` of values ``[B, Hkv, N, D]`` projected by ``weight`` ``[H, D, M]``."""
    group = len(weight) // v.shape[1]
    out = v.new_empty(len(v), len(weight), v.shape[2])
    for start in range(0, v.shape[2], TOKENS):
        part = slice(start, start + TOKENS)
        for head, matrix in enumerate(weight):
            rows = v[:, head // group, part, : len(matrix)]  # without the zeros that pad smaller heads
            out[:, head, part] = torch.linalg.vector_norm(rows @ matrix, ord=order, dim=-1)
    return out
