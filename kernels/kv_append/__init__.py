"""Appending of new tokens to rows in blocks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from torch import Tensor

from ag.kernels.dispatch import VARIABLE, Versions, function, no_triton
from ag.kernels.kv_append import cpu
from ag.kernels.native import TYPES
from ag.kernels.pages import WIDEST, Facts, Pages


def kv_append(pages: Pages, k: Tensor, v: Tensor, token_indices: Tensor, gate: Tensor | None = None) -> None:
    """Append new tokens to their rows and add them to ``pages.lengths``, in place.

    Args:
        pages: the rows; each has blocks for its new tokens, and shares none of these blocks with another row.
        k: keys ``[B, Hkv, T, D]`` of the pool's type, or of the type that its codes are made of; any strides.
        v: values ``[B, Hkv, T, Dv]``, likewise.
        token_indices: ``[B, T]`` long; tokens of a negative index are not written.
        gate: ``[B, Hkv, T]``, the gate output of each token; None writes a set flag, or the largest number, where
            the pool has a gate column.

    Raises:
        TypeError: keys or values have another type than the pool's.
        UserError: AG_KERNELS names a version that cannot run here.
    """
    if (k.dtype, v.dtype) != pages.dtypes:
        raise TypeError(
            f"new keys and values of {k.dtype} and {v.dtype}: expected {pages.dtypes[0]} and {pages.dtypes[1]} as held"
        )
    _version(pages.facts, os.environ.get(VARIABLE))(pages, k, v, token_indices, gate)


@functools.cache
def _version(facts: Facts, forced: str | None) -> Callable[..., None]:
    wide = facts.coded and facts.dtypes[0] not in TYPES
    reason = f"codes are not made of {facts.dtypes[0]}" if wide else facts.gaps
    versions: Versions = {
        "triton": no_triton(facts.device, facts.dtypes[0], facts.stored, WIDEST),
        "cpp": lambda: reason or cpu.KERNEL.unavailable(facts.device),
        "reference": None,
    }
    return function("kv_append", versions, forced)
