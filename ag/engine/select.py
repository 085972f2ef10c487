"""The one place that turns scores into decisions."""

from __future__ import annotations

import torch
from torch import Tensor


def select(score: Tensor, protected: Tensor, valid: Tensor, capacity: Tensor, order: Tensor | None = None) -> Tensor:
    """Keep what is protected and the best of the rest, up to a capacity.

    Args:
        score: ``[B, Hkv, N]``.
        protected: ``[B, Hkv, N]`` bool, kept whatever the score.
        valid: ``[B, Hkv, N]`` bool, the slots that hold a token.
        capacity: ``[B, Hkv]`` long, tokens to keep, not fewer than are protected; heads that hold fewer keep all.
        order: ``[B, Hkv, N]`` long, slots in the order in which equal scores are kept; None means as they lie.

    Returns:
        ``[B, Hkv, N]`` bool.
    """
    return best(standings(score, valid & ~protected, order), protected, valid, capacity)


def standings(score: Tensor, rivals: Tensor, order: Tensor | None = None) -> Tensor:
    """Return the place of each of the ``rivals`` in its head, 0 for the best, ``[B, Hkv, N]`` long; any elsewhere."""
    score = score.masked_fill(~rivals, float("-inf"))
    slots = sorted_slots(score, order, descending=True)
    index = torch.arange(slots.shape[-1], device=slots.device).expand_as(slots)
    return torch.empty_like(slots).scatter_(-1, slots, index)


def sorted_slots(values: Tensor, order: Tensor | None, *, descending: bool = False) -> Tensor:
    """Return slots ``[B, Hkv, N]`` sorted by values, equal ones in an order of slots; None means as they lie."""
    if order is None:
        return values.argsort(dim=-1, descending=descending, stable=True)
    return order.gather(-1, values.gather(-1, order).argsort(dim=-1, descending=descending, stable=True))


def best(standing: Tensor, protected: Tensor, valid: Tensor, capacity: Tensor) -> Tensor:
    """Do what :func:`select` does, from the :func:`standings` of what is not protected."""
    protected = protected & valid
    room = capacity - protected.sum(-1)
    return protected | (valid & (standing < room[..., None]))


def at_least(capacity: Tensor, floor: float, protected: Tensor) -> Tensor:
    """Return what each head gets in any case, ``[B, Hkv]``: a share of the capacity ``[B]``, and all it protects."""
    least = (capacity * floor).long()[:, None]
    return torch.maximum(least, protected.sum(-1))


def select_over_heads(
    score: Tensor,
    protected: Tensor,
    valid: Tensor,
    capacity: Tensor,
    floor: float,
    total: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Share the capacity of a layer among its heads by one top-k over all of them (Feng et al. 2024, "Ada-KV").

    Args:
        score: ``[B, Hkv, N]``.
        protected: ``[B, Hkv, N]`` bool.
        valid: ``[B, Hkv, N]`` bool.
        capacity: ``[B]`` long, tokens per KV head on average.
        floor: share of the capacity that every head keeps at least.
        total: ``[B]`` long, tokens of all heads; None means ``Hkv * capacity``.
        order: as for :func:`select`, head by head.

    Returns:
        ``[B, Hkv, N]`` bool, ``total`` of them True where that many are held.
    """
    total = capacity * score.shape[1] if total is None else total
    sure = select(score, protected, valid, at_least(capacity, floor, protected & valid), order)
    if order is not None:
        heads, slots = score.shape[1:]
        order = (order + torch.arange(heads, device=order.device)[:, None] * slots).flatten(1)[:, None]
    score, sure, every = (x.flatten(1)[:, None] for x in (score, sure, valid))
    return select(score, sure, every, total[:, None], order).view_as(valid)


def filling_order(keep: Tensor) -> Tensor:
    """Return from which slots ``[B, Hkv, N']`` those of rows come once the holes are filled by the last kept tokens.

    N' is the most that a head keeps; of a head that keeps fewer the rest may be any slots that it does not keep.
    """
    slots = torch.arange(keep.shape[-1], device=keep.device)
    kept = keep.sum(-1, keepdim=True)
    inside = slots < kept
    first = (inside & keep, inside & ~keep, ~inside & keep)
    stays, holes, movers = (x.long() for x in first)
    nth_mover = torch.zeros_like(holes).scatter_add_(-1, (movers.cumsum(-1) - 1).clamp_min(0), slots * movers)
    source = torch.where(stays.bool(), slots, nth_mover.gather(-1, (holes.cumsum(-1) - 1).clamp_min(0)))
    spare = (~keep).long().cumsum(-1).sub(1).clamp_min(0)
    others = torch.zeros_like(holes).scatter_add_(-1, spare, slots * ~keep)
    source = torch.where(inside, source, others.gather(-1, (slots - kept).clamp_min(0)))
    return source[..., : int(kept.max())]
