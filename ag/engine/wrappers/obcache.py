"""OBCache: the output's change when a key, a value or both are pruned, to first order."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ag.engine.records import Records
from ag.engine.rows import FUSED, AttentionRows, Values
from ag.engine.scorer_inputs import ScorerInputs
from ag.engine.scorers.base import Needs, RowScorer, grouped
from ag.engine.wrappers.base import Wrapper

RUN = 32  # see largest


def value_error(rows: AttentionRows) -> Tensor:
    """``A^2 ||v_p||^2``, the squared change of the output when the value becomes 0."""

    def error(a: Tensor, s: Tensor, values: Values) -> Tensor:
        norms = values.norms.repeat_interleave(a.shape[1] // values.norms.shape[1], 1)
        return a.square() * norms[:, :, None]

    return rows.pairs(error)


def key_error(rows: AttentionRows) -> Tensor:
    """``A^2 s^2 ||v_p - o_i||^2``, when the logit becomes 0 (first order)."""

    def error(a: Tensor, s: Tensor, values: Values) -> Tensor:
        out = Outputs.of(a, values)
        apart = out.expanded(values).clamp_min_(0.0)
        apart.scatter_(-1, out.largest_slot, out.difference.square().sum(-1, keepdim=True))
        return apart.view_as(a).mul_((a * s).square_())

    return rows.pairs(error)


def joint_error(rows: AttentionRows) -> Tensor:
    """``A^2 ||(1 + s) v_p - s o_i||^2``, when both do (first order; the cross term has the factor +2).

    ``||v + s (v - o)||^2 = ||v||^2 + s (2 <v, v - o> + s ||v - o||^2)``, and the two products differ by a number for
    each key and one for each query.
    """

    def error(a: Tensor, s: Tensor, values: Values) -> Tensor:
        out = Outputs.of(a, values)
        apart, s = out.expanded(values), s.reshape(*out.o.shape[:3], -1)
        of_query = 2.0 * (out.o @ values.centre.mT) + out.squares
        moved = torch.addcmul(apart, apart, s).add_((2.0 * values.along - values.spread)[:, :, None])
        moved = moved.sub_(of_query).mul_(s).add_(values.norms[:, :, None]).clamp_min_(0.0)
        change = out.nearest + values.centre + s.gather(-1, out.largest_slot) * out.difference
        moved.scatter_(-1, out.largest_slot, change.square().sum(-1, keepdim=True))
        return moved.view_as(a).mul_(a).mul_(a)

    return rows.pairs(error)


class Outputs(NamedTuple):
    """Outputs ``o_i = sum_p a_ip v_p`` of the queries of each KV head, from values less their centre.

    Where attention is sharp, an output is close to the value of the key with the largest weight, and the square of
    their difference, expanded, would cancel. This difference is therefore summed over the other keys: ``v_p - o_i =
    sum_(q != p) a_iq (v_p - v_q)``.
    """

    o: Tensor  # [B, Hkv, G w, D]
    squares: Tensor  # [B, Hkv, G w, 1], ||o||^2
    largest_slot: Tensor  # [B, Hkv, G w, 1], the slot of the key with the largest weight
    nearest: Tensor  # [B, Hkv, G w, D], its value less the centre
    difference: Tensor  # [B, Hkv, G w, D], its value less the output

    @classmethod
    def of(cls, a: Tensor, values: Values) -> Outputs:
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

    def expanded(self, values: Values) -> Tensor:
        """Return ``||v_p - o_i||^2`` of all pairs ``[B, Hkv, G w, N]``, expanded, so that each costs one product."""
        left = torch.cat([-2.0 * self.o, self.squares, torch.ones_like(self.squares)], -1)
        spread = values.spread[..., None]
        squared_distances: Tensor = left @ torch.cat([values.centred, torch.ones_like(spread), spread], -1).mT
        return squared_distances


def largest(a: Tensor) -> Tensor:
    """Return the place of the largest number of each row ``[..., N]``, ``[..., 1]`` long.

    The largest number of each run of 32 is found first, and then its place in one run: PyTorch finds a largest number
    on a CPU in less than a tenth of the time that it takes with its place.
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
    """Sums an output error where the base sums attention: same queries, same pooling, same protection.

    Source: "OBCache: Optimal Brain KV Cache Pruning for Efficient Long-Context LLM Inference", Eq. 5 to 7. The heads
    of a group are summed, which is the error of their concatenated output.
    """

    inner: RowScorer

    @cached_property
    def needs(self) -> Needs:
        """What the base needs; errors take more than attention weights."""
        return replace(super().needs, rows=False)

    @staticmethod
    @abstractmethod
    def error(rows: AttentionRows) -> Tensor:
        """Return the error ``[B, H, w, N]`` that each query would see without each key."""

    def note(self, inputs: ScorerInputs, records: Records) -> None:
        """Record the error where the base records attention."""
        self.inner.note(inputs, records, self.error)

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the error of the group's output."""
        return self.inner.pool(inputs, grouped(self.inner.sums(inputs, self.error), inputs, "sum"))


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
