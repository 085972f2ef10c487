"""The product of a weight matrix and the states of a few tokens."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

from ag.kernels.dispatch import VARIABLE, Versions, function
from ag.kernels.linear import cpu

#: With more tokens PyTorch is about as fast.
MOST_TOKENS = 8


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias`` for a few tokens, ``[..., out]``.

    Args:
        x: states ``[..., in]`` of the tokens, at best not more than ``MOST_TOKENS``.
        weight: ``[out, in]``, in the type of ``x``.
        bias: ``[out]``, in the type of ``x``. None: no bias.

    Raises:
        UserError: AG_KERNELS names a version that cannot run here.
    """
    facts = weight.device.type, x.dtype, weight.dtype, weight.is_contiguous()
    return version(*facts, os.environ.get(VARIABLE))(x, weight, bias)


@functools.cache
def version(
    device: str, states: torch.dtype, dtype: torch.dtype, contiguous: bool, forced: str | None
) -> Callable[..., Tensor]:
    """Return the version of :func:`linear` for states and a weight of these types on a device.

    Args:
        device: type of the device.
        states: type of the states.
        dtype: type of the weight.
        contiguous: whether the weight is contiguous.
        forced: value of ``AG_KERNELS``.
    """
    reason = None if contiguous else "the weight is not contiguous"
    if dtype not in (torch.float32, torch.bfloat16) or states != dtype:
        reason = f"states of {states} and a weight of {dtype} are not both float32 or bfloat16"
    versions: Versions = {"cpp": lambda: reason or cpu.KERNEL.unavailable(device), "reference": None}
    return function("linear", versions, forced)
