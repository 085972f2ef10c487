"""The one place that turns scores into decisions; tokens lie in the order of their ranks, in which equal scores go."""

from __future__ import annotations

import torch
from torch import Tensor


def select(score: Tensor, protected: Tensor, valid: Tensor, capacity: Tensor) -> Tensor:
    """Keep what is protected and the best of the rest, up to a capacity; of equal scores the first.

    Args:
        score: ``[B, Hkv, N]``.
        protected: ``[B, Hkv, N]`` bool, kept whatever the score.
        valid: ``[B, Hkv, N]`` bool, the places that hold a token, as in the result.
        capacity: ``[B, Hkv]`` long, tokens to keep, not fewer than are protected; heads that hold fewer keep all.
    """
    return best(standings(score, valid & ~protected), protected, valid, capacity)


def in_order(ranks: Tensor) -> Tensor:
    """Return slots ``[B, Hkv, N]`` long in the order of their tokens' ranks; free ones, of rank -1, come last."""
    slots: Tensor = ranks.masked_fill(ranks < 0, torch.iinfo(ranks.dtype).max).argsort(-1)
    return slots


def standings(score: Tensor, rivals: Tensor) -> Tensor:
    """Return the place of each of the ``rivals`` in its head, 0 for the best, ``[B, Hkv, N]`` long; any elsewhere."""
    order = score.masked_fill(~rivals, float("-inf")).argsort(dim=-1, descending=True, stable=True)
    index = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, index)


def best(standing: Tensor, protected: Tensor, valid: Tensor, capacity: Tensor) -> Tensor:
    """Do what :func:`select` does, from the :func:`standings` of what is not protected."""
    protected = protected & valid
    room = capacity - protected.sum(-1)
    return protected | (valid & (standing < room[..., None]))
