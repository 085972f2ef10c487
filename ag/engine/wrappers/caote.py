"""CAOTE: how much the attention output would change without a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ag.engine.observe import Observation
from ag.engine.scorers.base import group_sum
from ag.engine.wrappers.base import Wrapper


@dataclass(frozen=True, kw_only=True)
class Caote(Wrapper):
    """``h_p / (1 - h_p) ||o - v_p||`` with ``h`` the base score normalised over the held tokens and ``o = sum h v``.

    Source: "CAOTE: KV Caching through Attention Output Error-based Token Eviction", Eq. 5 to 7. It is the change of the
    output when one token goes and the rest is normalised anew. For weights over 1/2 the same is computed without the
    difference of near numbers, as ``h_p ||v_p - o_(-p)||`` with the output of the others. The heads of a group
    combine as
    the root of the sum of squares, the change of their concatenated output. The newest token stays on any base.
    """

    def protected(self, seen: Observation, capacity: Tensor) -> Tensor:
        """Return what the base protects, and the newest token."""
        return super().protected(seen, capacity) | (seen.age < 1)

    def score(self, seen: Observation) -> Tensor:
        """Return the change of the group's output."""
        weights = normalised(self.inner.heads(seen), seen)
        change = removal_error(weights, seen.v.repeat_interleave(seen.group, 1))
        return group_sum(change.square(), seen).sqrt()


@dataclass(frozen=True, kw_only=True)
class FastCaote(Caote):
    """CAOTE with the plain mean of the held values in the place of the output."""

    def score(self, seen: Observation) -> Tensor:
        """Return the change of the group's output, approximately."""
        weights = normalised(self.inner.heads(seen), seen).view(*seen.v.shape[:2], seen.group, -1)
        count = seen.key_valid.sum(-1, keepdim=True).clamp_min(1)
        mean = seen.v.sum(2, keepdim=True) / count[..., None]
        distance = torch.linalg.vector_norm(seen.v - mean, dim=-1)
        change = weights / (1 - weights).clamp_min(1e-6) * distance[:, :, None]
        return torch.sqrt(change.square().sum(2))


def normalised(heads: Tensor, seen: Observation) -> Tensor:
    """Divide ``[B, H, N]`` by its sum over the held tokens."""
    heads = heads.masked_fill(~seen.key_valid.repeat_interleave(seen.group, 1), 0.0)
    return heads / heads.sum(-1, keepdim=True).clamp_min(1e-30)


def removal_error(weights: Tensor, values: Tensor) -> Tensor:
    """Return ``||change of sum h v||`` when one token goes and the weights are normalised anew.

    Args:
        weights: ``[..., N]``, not below 0, summing to 1.
        values: ``[..., N, D]``.

    Returns:
        ``[..., N]``.
    """
    output = weights[..., None, :] @ values
    error = weights / (1 - weights).clamp_min(1e-6) * torch.linalg.vector_norm(values - output, dim=-1)
    top, index = weights.max(-1, keepdim=True)  # at most one weight is over 1/2
    others = weights.scatter(-1, index, 0.0)
    rest = others[..., None, :] @ values / others.sum(-1)[..., None, None].clamp_min(torch.finfo(weights.dtype).tiny)
    mine = values.gather(-2, index[..., None].expand(*index.shape, values.shape[-1]))
    exact = top * torch.linalg.vector_norm(mine - rest, dim=-1)
    return torch.scatter(error, -1, index, exact.where(top > 0.5, error.gather(-1, index)))
