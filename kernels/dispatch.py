"""Choice of an operation's version: the fastest version that can run here, or the version in ``AG_KERNELS``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ag.errors import UserError

VARIABLE = "AG_KERNELS"
#: Names of versions, and their modules in an operation's package. The function in a module has the operation's name.
VERSIONS = {"triton": "triton", "cpp": "cpu", "chunked": "chunked", "reference": "reference"}
INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on any device; set before Triton is imported
#: An operation's versions, fastest first, with the reason why each cannot run here, or a function that finds it out.
#: None: it can run.
Versions = Mapping[str, str | None | Callable[[], str | None]]
log = logging.getLogger(__name__)


def pick(operation: str, versions: Versions, forced: str | None) -> str:
    """Return the name of the version to run, and log the choice once.

    Args:
        operation: name of the operation.
        versions: the operation's versions. Those after the one that runs are not asked whether they can.
        forced: value of the environment variable ``AG_KERNELS``. Empty or None: the fastest version runs.

    Returns:
        The version ``forced`` if the operation has it, else the first version that can run.

    Raises:
        UserError: ``forced`` is no version's name, or that version cannot run here.
    """
    if forced and forced not in VERSIONS:
        raise UserError(f"{VARIABLE}={forced}: expected {', '.join(VERSIONS)}, or nothing for the fastest.")
    if forced and forced in versions:
        reason = _reason(versions[forced])
        if reason is not None:
            raise UserError(f"{VARIABLE}={forced}: {operation} cannot run so: {reason}. Unset {VARIABLE}.")
        chosen, why = forced, f"{VARIABLE} asks for it"
    else:
        faster = []
        for chosen, given in versions.items():
            reason = _reason(given)
            if reason is None:
                break
            faster.append(f"{chosen}: {reason}")
        why = "; ".join(faster)
    if not torch.compiler.is_compiling():
        _log_choice(operation, chosen, why)
    return chosen


def function(operation: str, versions: Versions, forced: str | None) -> Callable[..., Any]:
    """Import the module of the version that :func:`pick` chooses, and return its function.

    Operations cache the function, because a decoding step has little time for each layer.
    """
    module = importlib.import_module(f"ag.kernels.{operation}.{VERSIONS[pick(operation, versions, forced)]}")
    version: Callable[..., Any] = getattr(module, operation)
    return version


def no_triton(device: str, dtype: torch.dtype, size: int, largest: int = 256) -> str | None:
    """Return why Triton cannot run an operation. None: it can.

    Args:
        device: type of the tensors' device.
        dtype: type of the numbers that the operation multiplies or copies.
        size: the largest head size of the tensors.
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


def _reason(given: str | None | Callable[[], str | None]) -> str | None:
    return given() if callable(given) else given


@functools.cache
def _log_choice(operation: str, chosen: str, why: str) -> None:
    log.info("%s: %s%s", operation, chosen, f" ({why})" if why else "")
