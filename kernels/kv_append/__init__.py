"""Appending of new tokens to rows in blocks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from torch import Tensor

from ag.kernels.dispatch import VARIABLE, function, no_triton
from ag.kernels.kv_append import cpu
from ag.kernels.native import TYPES
from ag.kernels.pages import WIDEST, Facts, Pages


def kv_append(pages: Pages, k: Tensor, v: Tensor, ranks: Tensor, gate: Tensor | None = None) -> None:
    """Append new tokens to their rows and add them to ``pages.lengths``, in place.

    Args:
        pages: the rows. Each row has blocks for its new tokens, and shares none of these blocks with another row.
        k: keys ``[B, Hkv, T, D]`` in the pool's type, or in the type that its codes encode; any strides.
        v: values ``[B, Hkv, T, Dv]``, as ``k``.
        ranks: ``[B, T]`` long, the place of each token in its sequence; tokens of a rank below 0 are not written.
        gate: ``[B, Hkv, T]``, the gate output of each token. None: if the pool has a gate column, a set flag or the
            largest number is written.

    Raises:
        TypeError: keys or values have another type than the pool's.
        UserError: AG_KERNELS names a version that cannot run here.
    """
    if (k.dtype, v.dtype) != pages.dtypes:
        raise TypeError(
            f"new keys and values of {k.dtype} and {v.dtype}: expected {pages.dtypes[0]} and {pages.dtypes[1]} as held"
        )
    _version(pages.facts, os.environ.get(VARIABLE))(pages, k, v, ranks, gate)


@functools.cache
def _version(facts: Facts, forced: str | None) -> Callable[..., None]:
    wide = facts.coded and facts.dtypes[0] not in TYPES
    reason = f"codes are not made of {facts.dtypes[0]}" if wide else facts.gaps
    versions = {
        "triton": no_triton(facts.device, facts.dtypes[0], facts.stored, WIDEST),
        "cpp": reason or cpu.KERNEL.unavailable(facts.device),
        "reference": None,
    }
    return function("kv_append", versions, forced)
