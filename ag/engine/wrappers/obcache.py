"""OBCache: the output's change when a key, a value or both are pruned, to first order."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from ag.engine.attention_stats import AttentionStats
from ag.engine.records import Records
from ag.engine.rows import FUSED, AttentionRows, Values
from ag.engine.scorers.base import Needs, RowScorer, grouped
from ag.engine.wrappers.base import Wrapper


def value_error(rows: AttentionRows) -> Tensor:
    """``A^2 ||v_p||^2``, the squared change of the output when the value becomes 0."""
    return rows.pairs(lambda a, s, values: a.square() * _norms(a, values))


def key_error(rows: AttentionRows) -> Tensor:
    """``A^2 s^2 ||v_p - o_i||^2``, when the logit becomes 0 (first order)."""
    return rows.pairs(lambda a, s, values: differences(a, values)[0].mul_((a * s).square_()))


def joint_error(rows: AttentionRows) -> Tensor:
    """``A^2 ||(1 + s) v_p - s o_i||^2``, when both do (first order; the cross term has the factor +2)."""

    def error(a: Tensor, s: Tensor, values: Values) -> Tensor:
        apart, along = differences(a, values)
        moved = apart.mul_(s).add_(along, alpha=2.0).mul_(s).add_(_norms(a, values))  # ||v + s (v - o)||^2
        return moved.clamp_min_(0.0).mul_(a).mul_(a)

    return rows.pairs(error)


def _norms(a: Tensor, values: Values) -> Tensor:
    """Return ``||v||^2`` as weights ``[B, H, w, N]`` meet it."""
    return values.norms.repeat_interleave(a.shape[1] // values.norms.shape[1], 1)[:, :, None]


def differences(a: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    """Return ``||v_p - o_i||^2`` and ``<v_p, v_p - o_i>``, ``[B, H, w, N]`` each, where ``o_i = sum_p a_ip v_p``.

    Both are expanded, so that each pair costs one product of vectors. Where attention is sharp, the output is close to
    the value of the key with the largest weight, and the expansion would cancel. The difference of these two is
    therefore summed over the other keys: ``v_p - o_i = sum_(q != p) a_iq (v_p - v_q)``.
    """
    shape, v = a.shape, values.centred
    a = a.reshape(len(v), v.shape[1], -1, shape[-1])  # [B, Hkv, G w, N]
    top, index = a.max(-1, keepdim=True)
    others = a.scatter(-1, index, 0.0)
    mix = others @ v
    nearest = v.gather(2, index.expand(*index.shape[:3], v.shape[-1]))
    difference = others.sum(-1, keepdim=True) * nearest - mix
    o = top * nearest + mix
    dots = o @ v.mT
    apart = (values.spread[:, :, None] - 2 * dots).add_(o.square().sum(-1, keepdim=True)).clamp_min_(0.0)
    along = values.along[:, :, None] - dots.add_(o @ values.centre.mT)
    apart.scatter_(-1, index, difference.square().sum(-1, keepdim=True))
    along.scatter_(-1, index, (difference * (nearest + values.centre)).sum(-1, keepdim=True))
    return apart.view(shape), along.view(shape)


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

    def note(self, seen: AttentionStats, records: Records) -> None:
        """Record the error where the base records attention."""
        self.inner.note(seen, records, self.error)

    def score(self, seen: AttentionStats) -> Tensor:
        """Return the error of the group's output."""
        return self.inner.pool(seen, grouped(self.inner.sums(seen, self.error), seen, "sum"))


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
