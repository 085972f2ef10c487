"""The ring in C++: the copies of a few tokens, in one call."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor
from torch.autograd.graph import increment_version

from ag.errors import UserError
from ag.kernels import native

KERNEL = native.Kernel(
    Path(__file__).with_name("cpu.cpp"),
    (*[ctypes.c_void_p] * 10, *[ctypes.c_int64] * 6),
)


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
    new = [x.contiguous() for x in (new_keys, new_values, new_flags, new_ranks)]  # named, so that they outlive the call
    buffers = [keys, values, ranks, flags, lengths]
    if (new_keys.dtype, new_values.dtype) != (keys.dtype, values.dtype):  # it copies bytes, as many as a buffer's are
        raise UserError(
            f"ring_append: new keys and values of {new_keys.dtype} and {new_values.dtype}: expected {keys.dtype} and "
            f"{values.dtype} as held; let the model run in one data type, or make a new cache."
        )
    KERNEL(
        *(x.data_ptr() for x in (keys, values, ranks, flags, starts, lengths, *new)),
        *(len(starts), new_flags.shape[1]),
        *(x.shape[1] * x.element_size() for x in (keys, values)),
        *(ring, window or 0),
    )
    increment_version(buffers)  # autograd does not see the call


def unavailable(*buffers: Tensor) -> str | None:
    """Return why the C++ version cannot work in such buffers, or None."""
    return KERNEL.unavailable(*buffers, in_place=True)
