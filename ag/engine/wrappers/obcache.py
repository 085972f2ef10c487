"""OBCache: the output's change when a key, a value or both are pruned, to first order."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ag.engine.attention_rows import FUSED, CentredValues
from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import RowScorer, grouped
from ag.engine.wrappers.base import Wrapper

RUN = 32  # see largest


def value_error(weights: Tensor, logits: Tensor, values: CentredValues) -> Tensor:
    """``A^2 ||v_p||^2``, the squared change of the output when the value becomes 0."""
    group = weights.shape[1] // values.squared_norms.shape[1]
    return weights.square() * values.squared_norms.repeat_interleave(group, 1)[:, :, None]


def key_error(weights: Tensor, logits: Tensor, values: CentredValues) -> Tensor:
    """``A^2 s^2 ||v_p - o_i||^2``, when the logit becomes 0 (first order)."""
    outputs = Outputs.of(weights, values)
    distances = outputs.squared_distances(values).clamp_min_(0.0)
    distances.scatter_(-1, outputs.largest_slot, outputs.difference.square().sum(-1, keepdim=True))
    return distances.view_as(weights).mul_((weights * logits).square_())


def joint_error(weights: Tensor, logits: Tensor, values: CentredValues) -> Tensor:
    """``A^2 ||(1 + s) v_p - s o_i||^2``, when both become 0 (first order; the cross term has the factor +2).

    ``||v + s (v - o)||^2 = ||v||^2 + s (2 <v, v - o> + s ||v - o||^2)``, and the two products differ by a number for
    each key and a number for each query.
    """
    outputs = Outputs.of(weights, values)
    distances, s = outputs.squared_distances(values), logits.reshape(*outputs.o.shape[:3], -1)
    of_query = 2.0 * (outputs.o @ values.centre.mT) + outputs.squares
    moved = torch.addcmul(distances, distances, s)
    moved = moved.add_((2.0 * values.centred_dots - values.centred_squared_norms)[:, :, None])
    moved = moved.sub_(of_query).mul_(s).add_(values.squared_norms[:, :, None]).clamp_min_(0.0)
    change = outputs.nearest + values.centre + s.gather(-1, outputs.largest_slot) * outputs.difference
    moved.scatter_(-1, outputs.largest_slot, change.square().sum(-1, keepdim=True))
    return moved.view_as(weights).mul_(weights).mul_(weights)


class Outputs(NamedTuple):
    """Outputs ``o_i = sum_p a_ip v_p`` of the queries of each KV head, from values less their centre.

    If attention is sharp, an output is close to the value of the key p with the largest weight, and the expanded square
    of their difference would cancel. This difference is therefore a sum over all keys q but p: ``v_p - o_i =
    sum_(q != p) a_iq (v_p - v_q)``.
    """

    o: Tensor  # [B, Hkv, G w, D]
    squares: Tensor  # [B, Hkv, G w, 1], ||o||^2
    largest_slot: Tensor  # [B, Hkv, G w, 1], the slot of the key with the largest weight
    nearest: Tensor  # [B, Hkv, G w, D], its value less the centre
    difference: Tensor  # [B, Hkv, G w, D], its value less the output

    @classmethod
    def of(cls, a: Tensor, values: CentredValues) -> Outputs:
        """Return the outputs of weights ``[B, H, w, N]``."""
        v = values.centred
        a = a.reshape(len(v), v.shape[1], -1, a.shape[-1])
        largest_slot = largest(a)
        other_weights = a.scatter(-1, largest_slot, 0.0)
        mix = other_weights @ v
        nearest = v.gather(2, largest_slot.expand(*largest_slot.shape[:3], v.shape[-1]))
        o = a.gather(-1, largest_slot) * nearest + mix
        squares = o.square().sum(-1, keepdim=True)
        return cls(o, squares, largest_slot, nearest, other_weights.sum(-1, keepdim=True) * nearest - mix)

    def squared_distances(self, values: CentredValues) -> Tensor:
        """Return ``||v_p - o_i||^2`` of all pairs ``[B, Hkv, G w, N]``, expanded: each then costs one product."""
        left = torch.cat([-2.0 * self.o, self.squares, torch.ones_like(self.squares)], -1)
        norms = values.centred_squared_norms[..., None]
        distances: Tensor = left @ torch.cat([values.centred, torch.ones_like(norms), norms], -1).mT
        return distances


def largest(a: Tensor) -> Tensor:
    """Return the index of the largest number of each row ``[..., N]``, ``[..., 1]`` long.

    The largest number of each run of 32 is found first, and then the index within one run. On a CPU PyTorch takes ten
    times as long for a largest number with its index as for the number alone.
    """
    in_runs = a.shape[-1] // RUN * RUN
    if not in_runs:
        return a.argmax(-1, keepdim=True)
    runs = a[..., :in_runs].unflatten(-1, (-1, RUN))
    run = runs.amax(-1).argmax(-1, keepdim=True)
    within = runs.gather(-2, run[..., None].expand(*run.shape, RUN))[..., 0, :]
    slot: Tensor = run * RUN + within.argmax(-1, keepdim=True)
    if in_runs == a.shape[-1]:
        return slot
    tail = in_runs + a[..., in_runs:].argmax(-1, keepdim=True)
    return torch.where(a.gather(-1, tail) > a.gather(-1, slot), tail, slot)


FUSED[value_error] = "squares"


@dataclass(frozen=True, kw_only=True)
class OBCache(Wrapper):
    """Sums an output error in the place of the base's attention weight: same queries, same pooling, same protection.

    Source: "OBCache: Optimal Brain KV Cache Pruning for Efficient Long-Context LLM Inference", Eq. 5 to 7. The heads
    of a group are summed, which is the error of their concatenated output.
    """

    inner: RowScorer

    @staticmethod
    @abstractmethod
    def error(weights: Tensor, logits: Tensor, values: CentredValues) -> Tensor:
        """Return the error ``[B, H, w, N]`` that each query would see without each key."""

    @cached_property
    def needs(self) -> Needs:
        """The inputs that the base sums, with the error in the place of the weight."""
        return replace(self.inner.summing.needs, statistic=self.error, steady=False)

    @cached_property
    def decode_needs(self) -> Needs:
        """These inputs after the prompt."""
        return replace(self.inner.summing.decode_needs, statistic=self.error, steady=False)

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the error of the group's output."""
        return self.inner.pool(inputs, grouped(self.inner.summing.sums(inputs), inputs, "sum"))


@dataclass(frozen=True, kw_only=True)
class OBCacheValue(OBCache):
    """The value term."""

    error = staticmethod(value_error)


@dataclass(frozen=True, kw_only=True)
class OBCacheKey(OBCache):
    """The key term."""

    error = staticmethod(key_error)


@dataclass(frozen=True, kw_only=True)
class OBCacheJoint(OBCache):
    """Both terms and their cross term."""

    error = staticmethod(joint_error)
