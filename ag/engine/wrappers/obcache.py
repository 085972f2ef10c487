"""OBCache: the output's change when a key, a value or both are pruned, to first order."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ag.engine.observe import AttentionRows, Observation
from ag.engine.scorers.base import RowScorer, group_sum
from ag.engine.wrappers.base import Wrapper


def value_error(rows: AttentionRows) -> Tensor:
    """``A^2 ||v_p||^2``, the squared change of the output when the value becomes 0."""
    return rows.a.square().mul_(rows.value_norms())


def key_error(rows: AttentionRows) -> Tensor:
    """``A^2 s^2 ||v_p - o_i||^2``, when the logit becomes 0 (first order)."""
    distance = rows.less_dots().add_(rows.output_norms()).clamp_min_(0.0)
    change = rows.a * rows.s
    return distance.mul_(change).mul_(change)


def joint_error(rows: AttentionRows) -> Tensor:
    """``A^2 ||(1 + s) v_p - s o_i||^2``, when both do (first order; the cross term has the factor +2).

    Written as ``A^2 (||v||^2 + s (2 ||v||^2 - 2 <o, v> + s ||v - o||^2))``, with few passes over memory.
    """
    norms, slope = rows.value_norms(), rows.less_dots()
    distance = slope + rows.output_norms()
    torch.addcmul(slope.add_(norms), rows.s, distance, out=distance)
    torch.addcmul(norms, rows.s, distance, out=distance)
    return distance.clamp_min_(0.0).mul_(rows.a).mul_(rows.a)


@dataclass(frozen=True, kw_only=True)
class OBCache(Wrapper):
    """Sums an output error where the base sums attention: same queries, same pooling, same protection.

    Source: "OBCache: Optimal Brain KV Cache Pruning for Efficient Long-Context LLM Inference", Eq. 5 to 7. The heads
    of a group are summed, which is the error of their concatenated output.
    """

    @staticmethod
    @abstractmethod
    def error(rows: AttentionRows) -> Tensor:
        """Return the error ``[B, H, w, N]`` that each query would see without each key."""

    def score(self, seen: Observation) -> Tensor:
        """Return the error of the group's output."""
        assert isinstance(self.inner, RowScorer)
        return self.inner.pool(seen, group_sum(self.inner.sums(seen, self.error), seen))


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
