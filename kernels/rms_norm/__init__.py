"""The RMS norm of Llama (Zhang and Sennrich 2019, arXiv:1910.07467) in one operation."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

from ag.kernels.dispatch import VARIABLE, Versions, function
from ag.kernels.rms_norm import cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``weight * (x / sqrt(mean(x^2) + eps))`` of each token, ``[..., size]`` in the type of ``x``.

    The quotient is computed in float32 and rounded to the type of ``x`` before it is multiplied, as in transformers.

    Args:
        x: states ``[..., size]``.
        weight: ``[size]``, in the type of ``x``.
        eps: added to the mean of squares.

    Raises:
        UserError: AG_KERNELS names a version that cannot run here.
    """
    return version(x.device.type, x.dtype, weight.dtype, os.environ.get(VARIABLE))(x, weight, eps)


@functools.cache
def version(device: str, states: torch.dtype, weight: torch.dtype, forced: str | None) -> Callable[..., Tensor]:
    """Return the version of :func:`rms_norm` for states and a weight of these types on a device.

    Args:
        device: type of the device.
        states: type of the states.
        weight: type of the weight.
        forced: value of ``AG_KERNELS``.
    """
    reason = None
    if not states == weight == torch.bfloat16:
        reason = f"states of {states} and a weight of {weight} are not both bfloat16"
    versions: Versions = {"cpp": lambda: reason or cpu.KERNEL.unavailable(device), "reference": None}
    return function("rms_norm", versions, forced)
