"""CAOTE: how much the attention output would change without a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ag.engine.attention_stats import AttentionStats
from ag.engine.scorers.base import Needs, RowScorer, grouped
from ag.engine.wrappers.base import Wrapper, more

SMALLEST = 1e-12  # weight of all other tokens below which a token counts as the only one


@dataclass(frozen=True, kw_only=True)
class Caote(Wrapper):
    """``h_p / (1 - h_p) ||o - v_p||`` with ``h`` the base score normalised over the held tokens and ``o = sum h v``.

    Source: "CAOTE: KV Caching through Attention Output Error-based Token Eviction", Eq. 8 and 20 to 22. It is the
    change of the output when one token is evicted and the other weights are renormalised. For weights over 1/2 it is
    computed without a difference of near numbers, as ``h_p ||v_p - o_(-p)||`` with the output of the others. The heads
    of a group combine as the root of the sum of squares, the change of their concatenated output. The newest token
    stays on any base.

    Attributes:
        pool_stage: ``base``: a base that pools does so before; ``final``: the change is pooled instead.
        greedy: evict tokens one by one and compute the changes anew after each; as published all at once. The cost
            grows with the number of evicted tokens.
    """

    pool_stage: Literal["base", "final"] = "base"
    greedy: bool = False

    @cached_property
    def needs(self) -> Needs:
        """What the base needs, precisely."""
        return replace(self.inner.needs, precise=True)

    def limits(self, capacity: Tensor) -> tuple[int | Tensor, int | Tensor]:
        """Return what the base protects, and at least the newest token."""
        return more(super().limits(capacity), (0, 1))

    def score(self, seen: AttentionStats) -> Tensor:
        """Return the change of the group's output."""
        pooling = self.inner if self.pool_stage == "final" and isinstance(self.inner, RowScorer) else None
        heads = self.inner.heads(seen) if pooling is None else pooling.raw(seen)

        def score_of(held: Tensor) -> Tensor:
            change = self.change(normalised(heads, held.repeat_interleave(seen.group, 1)), seen, held)
            return change if pooling is None else pooling.pool(seen, change, before_window=False)

        if self.greedy and seen.capacity is not None:
            protected = self.protected(seen, seen.capacity)
            return one_by_one(score_of, seen.key_valid, protected, seen.capacity, seen.keys.order)
        return score_of(seen.key_valid)

    def change(self, weights: Tensor, seen: AttentionStats, held: Tensor) -> Tensor:
        """Return the change of the group's output, ``[B, Hkv, N]``, for weights ``[B, H, N]`` of the tokens held."""
        change = removal_error(weights, seen.v.repeat_interleave(seen.group, 1))
        return grouped(change.square(), seen, "sum").sqrt()


@dataclass(frozen=True, kw_only=True)
class FastCaote(Caote):
    """CAOTE with the plain mean of the held values in the place of the output (Eq. 23)."""

    def change(self, weights: Tensor, seen: AttentionStats, held: Tensor) -> Tensor:
        """Return the change of the group's output, approximately."""
        centred = seen.values.centred
        mean = (centred * held[..., None]).sum(2, keepdim=True) / held.sum(-1).clamp_min(1)[..., None, None]
        distance = torch.linalg.vector_norm(centred - mean, dim=-1).repeat_interleave(seen.group, 1)
        return grouped((odds(weights) * distance).square(), seen, "sum").sqrt()


def one_by_one(
    score_of: Callable[[Tensor], Tensor],
    valid: Tensor,
    protected: Tensor,
    capacity: Tensor,
    places: Tensor | None = None,
) -> Tensor:
    """Evict tokens one by one down to a capacity; returns scores ``[B, Hkv, N]``, below 0 and in that order.

    Args:
        score_of: maps the mask ``[B, Hkv, N]`` of held tokens to their scores.
        valid: ``[B, Hkv, N]`` bool, the tokens held at first.
        protected: ``[B, Hkv, N]`` bool, those that stay.
        capacity: ``[B]`` long.
        places: ``[B, Hkv, N]`` long, slots in the order in which those with equal scores go; None means as they lie.
    """
    held, order = valid.clone(), torch.zeros_like(valid, dtype=torch.long)
    surplus = (valid.sum(-1) - capacity[:, None]).clamp_min(0)
    rounds = int(surplus.max())
    for number in range(rounds):
        rivals = held & ~protected
        scores = score_of(held).masked_fill(~rivals, float("inf"))
        if places is None:
            worst = scores.argmin(-1, keepdim=True)
        else:
            worst = places.gather(-1, scores.gather(-1, places).argmin(-1, keepdim=True))
        goes = (number < surplus)[..., None] & rivals.gather(-1, worst)
        order.scatter_(-1, worst, torch.where(goes, number - rounds, order.gather(-1, worst)))
        held.scatter_(-1, worst, held.gather(-1, worst) & ~goes)
    return score_of(held).where(order == 0, order.float())


def normalised(heads: Tensor, held: Tensor) -> Tensor:
    """Divide ``[B, H, N]`` by its sum over the tokens held ``[B, H, N]``; 0 on others."""
    heads = heads.masked_fill(~held, 0.0)
    return heads / heads.sum(-1, keepdim=True).clamp_min(1e-30)


def odds(weights: Tensor) -> Tensor:
    """Return ``h / (1 - h)`` of weights ``[..., N]`` that sum to 1, from the sum of the others where h is near 1."""
    top, index = weights.max(-1, keepdim=True)
    others = weights.scatter(-1, index, 0.0).sum(-1, keepdim=True)
    return (weights / (1 - weights)).scatter(-1, index, top / others.clamp_min(SMALLEST))


def removal_error(weights: Tensor, values: Tensor) -> Tensor:
    """Return ``||change of sum h v||`` when one token is evicted and the other weights are renormalised.

    Args:
        weights: ``[..., N]``, not below 0, summing to 1.
        values: ``[..., N, D]``.

    Returns:
        ``[..., N]``.
    """
    # Only differences of values matter: without their common part, rounding errors are smaller.
    centred = values - values.mean(-2, keepdim=True)
    top, index = weights.max(-1, keepdim=True)
    others = weights.scatter(-1, index, 0.0)
    mix, rest = others[..., None, :] @ centred, others.sum(-1)[..., None, None]
    row = index[..., None].expand(*index.shape, values.shape[-1])
    mine = centred.gather(-2, row)
    error = weights / (1 - weights) * torch.linalg.vector_norm(centred - (mix + top[..., None] * mine), dim=-1)
    # Of the largest weight: h ||v - the others' mean||, without subtracting near numbers; h ||v|| if it is alone.
    left = torch.where(rest > 0, mine - mix / rest.clamp_min(torch.finfo(weights.dtype).tiny), values.gather(-2, row))
    result: Tensor = error.scatter(-1, index, top * torch.linalg.vector_norm(left, dim=-1))
    return result
