"""The ring in C++: the copies of a few tokens, in one call."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from ag.kernels import native

SOURCE = Path(__file__).with_name("cpu.cpp")
ARGUMENTS = (*[ctypes.c_void_p] * 10, *[ctypes.c_int64] * 6)


def ring_append(
    *,
    keys: Tensor,
    values: Tensor,
    ranks: Tensor,
    flags: Tensor,
    starts: Tensor,
    lengths: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    new_flags: Tensor,
    new_ranks: Tensor,
    ring: int,
    window: int | None = None,
) -> None:
    """Do what :func:`ag.kernels.ring_append.ring_append` does, on the CPU."""
    function = native.function(SOURCE, *ARGUMENTS)
    assert not isinstance(function, str)
    new = [x.contiguous() for x in (new_keys, new_values, new_flags, new_ranks)]  # named, so that they outlive the call
    function(
        *(x.data_ptr() for x in (keys, values, ranks, flags, starts, lengths, *new)),
        *(len(starts), new_flags.shape[1]),
        *(x.shape[1] * x.element_size() for x in (keys, values)),
        *(ring, window or 0),
    )


def unavailable(*tensors: Tensor) -> str | None:
    """Return why the C++ version cannot work in such buffers, or None."""
    if tensors[0].device.type != "cpu":
        return f"the tensors are on {tensors[0].device.type}"
    if not all(x.is_contiguous() for x in tensors):
        return "a buffer is not contiguous"
    function = native.function(SOURCE, *ARGUMENTS)
    return function if isinstance(function, str) else None
