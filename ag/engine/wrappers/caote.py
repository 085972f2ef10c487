"""CAOTE: how much the attention output would change without a token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ag.engine.attention_rows import subtract_centre
from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import grouped
from ag.engine.wrappers.base import Wrapper, larger_counts

SMALLEST = 1e-12  # weight of all other tokens below which a token counts as the only one


@dataclass(frozen=True, kw_only=True)
class Caote(Wrapper):
    """``h_p / (1 - h_p) ||o - v_p||`` with ``h`` the base score normalised over the cached tokens and ``o = sum h v``.

    Source: "CAOTE: KV Caching through Attention Output Error-based Token Eviction", Eq. 8 and 20 to 22. It is the
    change of the output when one token is evicted and the remaining weights are renormalised. For weights over 1/2 it
    is computed without a difference of near numbers, as ``h_p ||v_p - o_(-p)||`` with the output ``o_(-p)`` of the
    remaining tokens. The heads of a group combine as the root of the sum of squares, the change of their concatenated
    output. The newest token is kept on any base.
    """

    def add_needs(self, needs: Needs) -> Needs:
        """Return the base's needs and the values."""
        return replace(super().add_needs(needs), values=True, key_valid=True)

    def limits(self, capacity: Tensor) -> tuple[int | Tensor, int | Tensor]:
        """Return the numbers of tokens that the base protects, and at least the newest token."""
        return larger_counts(super().limits(capacity), (0, 1))

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the change of the group's output."""
        heads = self.inner.heads(inputs).masked_fill(~inputs.key_valid.repeat_interleave(inputs.group, 1), 0.0)
        weights = heads / heads.sum(-1, keepdim=True).clamp_min(1e-30)
        return grouped(self.change(weights, inputs).square(), inputs, "sum").sqrt()

    def change(self, weights: Tensor, inputs: ScorerInputs) -> Tensor:
        """Return the change of each head's output, ``[B, H, N]``, for weights ``[B, H, N]`` of the cached tokens."""
        return removal_error(weights, inputs.values.repeat_interleave(inputs.group, 1))


@dataclass(frozen=True, kw_only=True)
class FastCaote(Caote):
    """CAOTE with the plain mean of the cached values in the place of the output (Eq. 23)."""

    def add_needs(self, needs: Needs) -> Needs:
        """Return the base's needs, the values and the slots that hold them."""
        return replace(super().add_needs(needs), occupied=True)

    def change(self, weights: Tensor, inputs: ScorerInputs) -> Tensor:
        """Return the change of each head's output, approximately."""
        _, centred = subtract_centre(inputs.values, inputs.occupied)  # differences then have smaller rounding errors
        valid = inputs.key_valid
        mean = (centred * valid[..., None]).sum(2, keepdim=True) / valid.sum(-1).clamp_min(1)[..., None, None]
        distance: Tensor = torch.linalg.vector_norm(centred - mean, dim=-1).repeat_interleave(inputs.group, 1)
        return odds(weights) * distance


def odds(weights: Tensor) -> Tensor:
    """Return ``h / (1 - h)`` of weights ``[..., N]`` that sum to 1; ``1 - h`` of the largest sums all other weights."""
    top, index = weights.max(-1, keepdim=True)
    other_weights = weights.scatter(-1, index, 0.0).sum(-1, keepdim=True)
    return (weights / (1 - weights)).scatter(-1, index, top / other_weights.clamp_min(SMALLEST))


def removal_error(weights: Tensor, values: Tensor) -> Tensor:
    """Return ``||change of sum h v||`` ``[..., N]`` when a token is evicted and the remaining weights are renormalised.

    The weights ``[..., N]`` sum to 1; the values are ``[..., N, D]``.
    """
    # Only differences of values matter: without their common part, rounding errors are smaller.
    centred = values - values.mean(-2, keepdim=True)
    top, index = weights.max(-1, keepdim=True)
    other_weights = weights.scatter(-1, index, 0.0)
    mix, weight_left = other_weights[..., None, :] @ centred, other_weights.sum(-1)[..., None, None]
    row = index[..., None].expand(*index.shape, values.shape[-1])
    largest_value = centred.gather(-2, row)
    error = weights / (1 - weights) * torch.linalg.vector_norm(centred - (mix + top[..., None] * largest_value), dim=-1)
    # The largest weight: h ||v - mean of all other values||, no difference of near numbers; h ||v|| if it is alone.
    left = torch.where(
        weight_left > 0,
        largest_value - mix / weight_left.clamp_min(torch.finfo(weights.dtype).tiny),
        values.gather(-2, row),
    )
    result: Tensor = error.scatter(-1, index, top * torch.linalg.vector_norm(left, dim=-1))
    return result
