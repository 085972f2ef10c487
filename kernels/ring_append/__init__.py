"""One new token per sequence into rows whose newest tokens lie in a ring."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.dispatch import no_triton, pick
from ag.kernels.ring_append import cpu
from ag.kernels.ring_append.reference import reference_ring_append


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
    """Store the new token of each sequence; what leaves the ring stays if it is flagged. Everything happens in place.

    Row ``b * Hkv + h`` is KV head h of sequence b and fills the slots ``starts[r] : starts[r] + lengths[r]`` of flat
    buffers. The new token of rank n goes to slot ``n % ring`` of its row. The token that lies there leaves the ring: it
    moves to the end of the row if it is flagged, else it is overwritten. A row that is too short to have this slot
    becomes one token longer. With a window the token of rank ``n - window`` goes too, if the row holds it: the last one
    of the row takes its slot. So a row grows by at most one token.

    Args:
        keys: ``[S, D]``; at least one slot behind each row is free.
        values: ``[S, Dv]``.
        ranks: ``[S]`` int32, the place of each token among its sequence's own ones.
        flags: ``[S]`` bool, which tokens stay when they leave the ring.
        starts: ``[R]`` long, R = B Hkv, on the device of the keys.
        lengths: ``[R]`` long, on the device of the keys; changed in place too.
        new_keys: ``[B, Hkv, D]``.
        new_values: ``[B, Hkv, Dv]``.
        new_flags: ``[B, Hkv]`` bool.
        new_ranks: ``[B]`` long; below 0 where a sequence has no new token, whose rows stay as they are.
        ring: slots of the ring, at least 1.
        window: distance from which on no query sees a token, not below ``ring``; None: there is none.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    buffers = keys, values, ranks, flags, starts, lengths
    version = pick(
        "ring_append",
        {"triton": no_triton(keys, values), "cpp": cpu.unavailable(*buffers), "reference": None},
    )
    append = {"cpp": cpu.ring_append}.get(version, reference_ring_append)
    if version == "triton":
        from ag.kernels.ring_append.triton import triton_ring_append as append
    append(
        keys=keys,
        values=values,
        ranks=ranks,
        flags=flags,
        starts=starts,
        lengths=lengths,
        new_keys=new_keys,
        new_values=new_values,
        new_flags=new_flags,
        new_ranks=new_ranks,
        ring=ring,
        window=window,
    )
