"""The product of a weight and one token's states, on all threads."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.dispatch import pick
from ag.kernels.gemv import cpu
from ag.kernels.gemv.reference import reference_gemv


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``weight @ x + bias`` for one token, ``[..., out]``.

    Args:
        x: states ``[..., in]``, of which there is one.
        weight: ``[out, in]`` of the same type.
        bias: ``[out]`` of the same type, or None.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    return (cpu.gemv if best_version(weight) == "cpp" else reference_gemv)(x, weight, bias)


def best_version(weight: Tensor) -> str:
    """Return the version that :func:`gemv` runs for a weight: ``cpp`` or ``reference``."""
    if torch.get_num_threads() == 1:  # one thread reads as fast in PyTorch
        return "reference"
    return pick("gemv", {"cpp": cpu.unavailable(weight), "reference": None})
