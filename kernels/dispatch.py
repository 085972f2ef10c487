"""Which version of an operation runs: the fastest that can, or the one that the environment asks for."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import os

import torch
from torch import Tensor

from ag.errors import UserError

VARIABLE = "AG_KERNELS"
VERSIONS = ("triton", "cpp", "chunked", "reference")
INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # which must be set before Triton is imported
log = logging.getLogger(__name__)


def pick(operation: str, versions: dict[str, str | None]) -> str:
    """Return the name of the version to run, and log the choice once.

    Args:
        operation: name of the operation.
        versions: the versions it has, best first, each with the reason why it cannot run here, or None when it can.

    Returns:
        The version that ``AG_KERNELS`` names where the operation has it, else the first that can run.

    Raises:
        UserError: ``AG_KERNELS`` names no version, or one that cannot run here.
    """
    forced = os.environ.get(VARIABLE)
    if forced and forced not in VERSIONS:
        raise UserError(f"{VARIABLE}={forced}: expected {', '.join(VERSIONS)}, or nothing for the fastest.")
    if forced in versions:
        reason = versions[forced]
        if reason is not None:
            raise UserError(f"{VARIABLE}={forced}: {operation} cannot run so: {reason}. Unset {VARIABLE}.")
        chosen = forced
    else:
        chosen = next(name for name, reason in versions.items() if reason is None)
    if not torch.compiler.is_compiling():
        _tell(operation, chosen, chosen == forced, tuple(versions.items()))
    return chosen


def no_triton(*tensors: Tensor, dtype: torch.dtype | None = None, widest: int = 0, largest: int = 256) -> str | None:
    """Return why Triton cannot run an operation on these tensors ``[..., D]``, or None.

    Args:
        tensors: arguments of one type on one device.
        dtype: of the numbers that codes stand for, where the tensors hold such.
        widest: a D that none of them has.
        largest: the largest D that the kernel takes.
    """
    x = tensors[0]
    if not INSTALLED:
        return "Triton is not installed (pip install triton)"
    if not x.is_cuda and not INTERPRETED:
        return f"the tensors are on {x.device.type}"
    dtype = x.dtype if dtype is None else dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{dtype} is not float32, bfloat16 or float16"
    if INTERPRETED and dtype == torch.bfloat16:
        return "Triton's interpreter has no bfloat16 products"
    widest = max(widest, *(tensor.shape[-1] for tensor in tensors))
    return f"the head size {widest} is above {largest}" if widest > largest else None


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, on any device."""
    return INTERPRETED


@functools.cache
def _tell(operation: str, chosen: str, forced: bool, versions: tuple[tuple[str, str | None], ...]) -> None:
    better = itertools.takewhile(lambda version: version[0] != chosen, versions)
    why = f"{VARIABLE} asks for it" if forced else "; ".join(f"{name}: {reason}" for name, reason in better)
    log.info("%s: %s%s", operation, chosen, f" ({why})" if why else "")
