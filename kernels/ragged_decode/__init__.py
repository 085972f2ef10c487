"""One new token per sequence against ragged rows of keys and values."""

from __future__ import annotations

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
    mixed = None if q.dtype == keys.dtype == values.dtype else "queries, keys and values differ in type"
    version = pick(
        "ragged_decode",
        {
            "triton": mixed or no_triton(q, values),
            "flash": mixed or flash.unavailable(keys, values),
            "cpp": cpu.unavailable(keys, values),
            "chunked": None,
            "reference": None,
        },
    )
    attend = {"cpp": cpu.ragged_decode, "chunked": chunked_ragged_decode}.get(version, reference_ragged_decode)
    if version == "flash":
        attend = flash_ragged_decode
    if version == "triton":
        from ag.kernels.ragged_decode.triton import triton_ragged_decode as attend
    return attend(q, keys, values, starts, lengths, scaling)
