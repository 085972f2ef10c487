"""One new token per sequence against ragged rows of keys and values."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.dispatch import pick
from ag.kernels.ragged_decode import cpu
from ag.kernels.ragged_decode.chunked import chunked_ragged_decode
from ag.kernels.ragged_decode.reference import reference_ragged_decode

_VERSIONS = {
    "cpp": cpu.ragged_decode,
    "chunked": chunked_ragged_decode,
    "reference": reference_ragged_decode,
}


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
    reason = cpu.unavailable(keys, values)
    version = pick("ragged_decode", {"cpp": reason, "chunked": None, "reference": None})
    return _VERSIONS[version](q, keys, values, starts, lengths, scaling)
