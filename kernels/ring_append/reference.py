"""The ring in a few PyTorch operations on all rows; no host wait."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_ring_append(
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
    """Do what :func:`ag.kernels.ring_append.ring_append` does."""
    rank = new_ranks.repeat_interleave(new_flags.shape[1])
    place = rank % ring
    held, real = place < lengths, rank >= 0
    slots, ends = starts + place.minimum(lengths), starts + lengths
    leaves = held & real & flags[slots]
    new = new_keys.flatten(0, 1), new_values.flatten(0, 1), rank.to(ranks.dtype), new_flags.flatten()
    for x, token in zip((keys, values, ranks, flags), new, strict=True):
        old = x[slots]
        x[ends] = old  # where nothing leaves: to a free slot
        x[slots] = torch.where(real if x.ndim == 1 else real[:, None], token, old)
    lengths += leaves | (real & ~held)
    if window is not None:
        _expire((keys, values, ranks, flags), starts, lengths, torch.where(real, rank - window, -1))


def _expire(buffers: tuple[Tensor, ...], starts: Tensor, lengths: Tensor, ranks: Tensor) -> None:
    """Drop the token of a rank ``[R]`` from each row that holds it; below 0: none."""
    slots = torch.arange(len(buffers[0]), device=starts.device)
    inside = (slots >= starts[:, None]) & (slots < (starts + lengths)[:, None])
    old = inside & (buffers[2] == ranks[:, None]) & (ranks >= 0)[:, None]
    gone, last = old.any(1), (starts + lengths - 1).clamp_min(0)
    place = torch.where(gone, old.long().argmax(1), last)
    for x in buffers:
        x[place] = x[last]
    lengths -= gone.long()
