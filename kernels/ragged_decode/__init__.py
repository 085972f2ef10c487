"""One new token per sequence against ragged rows of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ag.kernels.dispatch import no_triton, pick
from ag.kernels.ragged_decode import cpu, flash
from ag.kernels.ragged_decode.chunked import chunked_ragged_decode
from ag.kernels.ragged_decode.flash import flash_ragged_decode
from ag.kernels.ragged_decode.reference import reference_ragged_decode


def ragged_decode(q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, scaling: float) -> Tensor:
    """Attend from one query per sequence to all that its rows hold.

    Row ``b * Hkv + h`` is KV head h of sequence b; its tokens are ``keys[starts[r] : starts[r] + lengths[r]]``.

    Args:
        q: ``[B, H, D]``; query head h reads KV head h // (H / Hkv).
        keys: ``[S, D]``, all rows in one flat buffer, with free slots anywhere between them.
        values: ``[S, Dv]``.
        starts: ``[R]`` long, R = B Hkv, on the device of the keys.
        lengths: ``[R]`` long; a row of no tokens gives 0.
        scaling: factor of the logits.

    Returns:
        ``[B, H, Dv]``, softmax and sums in float32 (float64 for float64 arguments).

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    return _run(_version(q, keys, values), q, keys, values, starts, lengths, scaling)


def ragged_decode_weights(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, scaling: float, longest: int
) -> tuple[Tensor, Tensor | None]:
    """Do what :func:`ragged_decode` does, and hand out the weights where the version that runs has them.

    Args:
        q: as there, like the next five.
        keys: as there.
        values: as there.
        starts: as there.
        lengths: as there.
        scaling: as there.
        longest: tokens of the longest row, N.

    Returns:
        What ``ragged_decode`` returns; and the weights ``[B, H, N]`` in float32, 0 behind the end of a row, from
        ``cpp`` and ``reference``, from others None.
    """
    version = _version(q, keys, values)
    if version not in ("cpp", "reference"):
        return _run(version, q, keys, values, starts, lengths, scaling), None
    attend = cpu.ragged_decode if version == "cpp" else reference_ragged_decode
    weights = torch.empty(*q.shape[:2], longest, dtype=torch.float32, device=q.device)
    return attend(q, keys, values, starts, lengths, scaling, weights), weights


def _version(q: Tensor, keys: Tensor, values: Tensor) -> str:
    mixed = None if q.dtype == keys.dtype == values.dtype else "queries, keys and values differ in type"
    return pick(
        "ragged_decode",
        {
            "triton": mixed or no_triton(q, values),
            "flash": mixed or flash.unavailable(keys, values),
            "cpp": cpu.unavailable(keys, values),
            "chunked": None,
            "reference": None,
        },
    )


def _run(version: str, *arguments: Any) -> Tensor:
    attend: Callable[..., Tensor]
    attend = {"cpp": cpu.ragged_decode, "chunked": chunked_ragged_decode}.get(version, reference_ragged_decode)
    if version == "flash":
        attend = flash_ragged_decode
    if version == "triton":
        from ag.kernels.ragged_decode.triton import triton_ragged_decode as attend
    return attend(*arguments)
