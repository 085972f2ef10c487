"""Choice of an operation's version: the fastest that can run here, or the one that ``AG_KERNELS`` names."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from ag.errors import UserError

VARIABLE = "AG_KERNELS"
#: Names of versions, and the modules of an operation's package that hold them, in functions named like the operation.
VERSIONS = {"triton": "triton", "cpp": "cpu", "chunked": "chunked", "reference": "reference"}
INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on any device; set before Triton is imported
log = logging.getLogger(__name__)


def pick(operation: str, versions: dict[str, str | None], forced: str | None) -> str:
    """Return the name of the version to run, and log the choice once.

    Args:
        operation: name of the operation.
        versions: the versions it has, best first, each with the reason why it cannot run here, or None when it can.
        forced: value of the environment variable ``AG_KERNELS``; empty or None means that the fastest version runs.

    Returns:
        The version that ``forced`` names where the operation has it, else the first that can run.

    Raises:
        UserError: ``forced`` names no version, or one that cannot run here.
    """
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
        _log_choice(operation, chosen, chosen == forced, tuple(versions.items()))
    return chosen


def function(operation: str, versions: dict[str, str | None], forced: str | None) -> Callable[..., Any]:
    """Return the function of the version that :func:`pick` names, and import its module.

    Operations cache what they choose, because a decoding step has little time for each layer.
    """
    module = importlib.import_module(f"ag.kernels.{operation}.{VERSIONS[pick(operation, versions, forced)]}")
    version: Callable[..., Any] = getattr(module, operation)
    return version


def no_triton(device: str, dtype: torch.dtype, size: int, largest: int = 256) -> str | None:
    """Return why Triton cannot run an operation, or None.

    Args:
        device: type of the device of its tensors.
        dtype: of the numbers that it multiplies or copies.
        size: the largest head size among its tensors.
        largest: the largest head size that the kernel takes.
    """
    if not INSTALLED:
        return "Triton is not installed (pip install triton)"
    if device != "cuda" and not INTERPRETED:
        return f"the tensors are on {device}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{dtype} is not float32, bfloat16 or float16"
    if INTERPRETED and dtype == torch.bfloat16:
        return "Triton's interpreter has no bfloat16 products"
    return f"the head size {size} is above {largest}" if size > largest else None


@functools.cache
def _log_choice(operation: str, chosen: str, forced: bool, versions: tuple[tuple[str, str | None], ...]) -> None:
    better = itertools.takewhile(lambda version: version[0] != chosen, versions)
    choice = f"{VARIABLE} asks for it" if forced else "; ".join(f"{name}: {reason}" for name, reason in better)
    log.info("%s: %s%s", operation, chosen, f" ({choice})" if choice else "")
