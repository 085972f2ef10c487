"""OBCache: the output's change when a key, a value or both are pruned, to first order."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from torch import Tensor

from ag.engine.observe import Observation
from ag.engine.records import Records
from ag.engine.rows import FUSED, AttentionRows, Statistic
from ag.engine.scorers.base import Needs, RowScorer, grouped
from ag.engine.wrappers.base import Wrapper
from ag.errors import UserError, require


def value_error(rows: AttentionRows) -> Tensor:
    """``A^2 ||v_p||^2``, the squared change of the output when the value becomes 0."""
    return rows.statistic("value")


def key_error(rows: AttentionRows) -> Tensor:
    """``A^2 s^2 ||v_p - o_i||^2``, when the logit becomes 0 (first order)."""
    return rows.statistic("key")


def joint_error(rows: AttentionRows) -> Tensor:
    """``A^2 ||(1 + s) v_p - s o_i||^2``, when both do (first order; the cross term has the factor +2)."""
    return rows.statistic("joint")


FUSED.update({value_error: "value", key_error: "key", joint_error: "joint"})


@dataclass(frozen=True)
class OfMean:
    """A statistic of the group's mean query: weights, logits and outputs are averaged over the heads first."""

    error: Statistic

    def __call__(self, rows: AttentionRows) -> Tensor:
        """Return it for each head, divided by the number of heads in a group: the sum over a group is the statistic."""
        kv_heads = rows.values.v.shape[1]
        group = rows.a.shape[1] // kv_heads
        return self.error(rows.mean_heads()).repeat_interleave(group, 1) / group


@dataclass(frozen=True, kw_only=True)
class OBCache(Wrapper):
    """Sums an output error where the base sums attention: same queries, same pooling, same protection.

    Source: "OBCache: Optimal Brain KV Cache Pruning for Efficient Long-Context LLM Inference", Eq. 5 to 7. The heads
    of a group are summed, which is the error of their concatenated output.

    Attributes:
        group: how the errors of a group combine: ``sum``, ``mean`` (the same ranking within a head), ``max``, or
            ``pre``: weights, logits and outputs are averaged over the group first, and scored once.
        obc_window: sum over so many of the last queries instead of the base's (the paper's needle setting: 16).
    """

    inner: RowScorer
    group: Literal["sum", "mean", "max", "pre"] = "sum"
    obc_window: int | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range, and a window where the base has none."""
        super().__post_init__()
        require(self, "obc_window", self.obc_window is None or self.obc_window >= 1, "1 or more, or None")
        if self.obc_window is not None and not hasattr(self.inner, "window"):
            raise UserError(
                f"obc_window={self.obc_window}: {type(self.inner).__name__} reads the newest query only; leave it out."
            )

    @property
    def host(self) -> RowScorer:
        """The base with the window of this wrapper."""
        return self.inner if self.obc_window is None else replace(self.inner, window=self.obc_window)  # type: ignore[call-arg]

    @cached_property
    def needs(self) -> Needs:
        """What the base or its other window needs, precisely; errors take more than attention weights."""
        lookback = max(self.inner.needs.lookback, self.host.needs.lookback)
        return replace(self.inner.needs, lookback=lookback, precise=True, rows=False)

    @staticmethod
    @abstractmethod
    def error(rows: AttentionRows) -> Tensor:
        """Return the error ``[B, H, w, N]`` that each query would see without each key."""

    @property
    def statistic(self) -> Statistic:
        """The error as a statistic of attention rows."""
        return OfMean(self.error) if self.group == "pre" else self.error

    def note(self, seen: Observation, records: Records) -> None:
        """Record the error where the base records attention."""
        self.host.note(seen, records, self.statistic)

    def score(self, seen: Observation) -> Tensor:
        """Return the error of the group's output."""
        sums = self.host.sums(seen, self.statistic)
        return self.inner.pool(seen, grouped(sums, seen, "sum" if self.group == "pre" else self.group))


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
