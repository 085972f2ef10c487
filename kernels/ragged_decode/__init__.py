"""One new token per sequence against ragged rows of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ag.kernels.dispatch import VERSIONS, no_triton, pick
from ag.kernels.ragged_decode import cpu, flash
from ag.kernels.ragged_decode.chunked import chunked_ragged_decode
from ag.kernels.ragged_decode.flash import flash_ragged_decode
from ag.kernels.ragged_decode.reference import reference_ragged_decode


def ragged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scaling: float,
    longest: int | None = None,
) -> Tensor:
    """Attend from one query per sequence to all that its rows hold.

    Row ``b * Hkv + h`` is KV head h of sequence b; its tokens are ``keys[starts[r] : starts[r] + lengths[r]]``.

    Args:
        q: ``[B, H, D]``; query head h reads KV head h // (H / Hkv).
        keys: ``[S, D]``, all rows in one flat buffer, with free slots anywhere between them.
        values: ``[S, Dv]``.
        starts: ``[R]`` long, R = B Hkv, on the device of the keys.
        lengths: ``[R]`` long; a row of no tokens gives 0.
        scaling: factor of the logits.
        longest: tokens that no row exceeds, as near as the host knows; it decides how work is cut. None: S.

    Returns:
        ``[B, H, Dv]``, softmax and sums in float32 (float64 for float64 arguments).

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    reasons = _reasons(q, keys, values)
    others = {"flash": flash.unavailable(q, keys, values), "chunked": None}
    version = pick("ragged_decode", {name: (reasons | others)[name] for name in VERSIONS})
    if version == "flash":
        most = len(keys) if longest is None else longest
        out: Tensor = flash_ragged_decode(q, keys, values, starts, lengths, scaling, most)
        return out
    if version == "chunked":
        return chunked_ragged_decode(q, keys, values, starts, lengths, scaling)
    return _run(version, q, keys, values, starts, lengths, scaling)


def ragged_decode_weights(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, scaling: float, longest: int
) -> tuple[Tensor, Tensor]:
    """Do what :func:`ragged_decode` does, and hand out the weights, for which no key is read again.

    Args:
        q: as there, like the next five.
        keys: as there.
        values: as there.
        starts: as there.
        lengths: as there.
        scaling: as there.
        longest: tokens of the longest row, N.

    Returns:
        What ``ragged_decode`` returns; and the weights ``[B, H, N]`` in float32 by slot of the row, 0 behind its end.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    version = pick("ragged_decode_weights", _reasons(q, keys, values))
    weights = torch.empty(*q.shape[:2], longest, dtype=torch.float32, device=q.device)
    return _run(version, q, keys, values, starts, lengths, scaling, weights), weights


def _reasons(q: Tensor, keys: Tensor, values: Tensor) -> dict[str, str | None]:
    """Return why the versions that hand out weights cannot run, or None, by name, best first."""
    mixed = None if q.dtype == keys.dtype == values.dtype else "queries, keys and values differ in type"
    return {"triton": mixed or no_triton(q, values), "cpp": cpu.unavailable(keys, values), "reference": None}


def _run(version: str, *arguments: Any) -> Tensor:
    attend: Callable[..., Tensor]
    attend = cpu.ragged_decode if version == "cpp" else reference_ragged_decode
    if version == "triton":
        from ag.kernels.ragged_decode.triton import triton_ragged_decode as attend
    return attend(*arguments)
