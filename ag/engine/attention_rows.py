"""Attention rows of a few queries: from logits to weights, statistics of weights, and sums over queries, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ag.kernels.attention_stats import Kind

INF = float("inf")


@dataclass(frozen=True)
class CentredValues:
    """Values of keys, and the products of values that statistics read, computed once for all tiles of queries.

    A difference ``v_p - o_i`` does not change if a vector is subtracted from all values. The rounding errors of its
    expansion in products do: they grow with the distance of the values from the origin. Products therefore use
    ``v - centre``.

    Attributes:
        v: values ``[B, Hkv, N, D]``, 0 on free slots.
        centre: mean of the values on occupied slots ``[B, Hkv, 1, D]``.
        centred: ``v - centre``, 0 on free slots.
        squared_norms: ``||v||^2``, ``[B, Hkv, N]``.
        centred_squared_norms: ``||v - centre||^2``, ``[B, Hkv, N]``.
        centred_dots: ``<v, v - centre>``, ``[B, Hkv, N]``.
    """

    v: Tensor
    centre: Tensor
    centred: Tensor
    squared_norms: Tensor
    centred_squared_norms: Tensor
    centred_dots: Tensor

    @classmethod
    def of(cls, v: Tensor, occupied: Tensor) -> CentredValues:
        """Centre values ``[B, Hkv, N, D]``, which are 0 on the slots that are not ``occupied`` ``[B, Hkv, N]`` bool."""
        centre, centred = subtract_centre(v, occupied)
        norms = centred.square().sum(-1)
        return cls(v, centre, centred, v.square().sum(-1), norms, norms + (centred @ centre.mT)[..., 0])

    def with_zero_value(self) -> CentredValues:
        """Return these values and one more, the vector 0, which does not move the centre."""
        zero, centred_zero = torch.zeros_like(self.centre), -self.centre
        none = torch.zeros_like(self.squared_norms[..., :1])
        appended = zero, centred_zero, none, centred_zero.square().sum(-1), none
        v, centred, *products = (torch.cat(pair, 2) for pair in zip(self._by_key(), appended, strict=True))
        return CentredValues(v, self.centre, centred, *products)

    def part(self, heads: slice, keys: slice) -> CentredValues:
        """Return views of the values of some KV heads and keys."""
        v, centred, *products = (x[:, heads, keys] for x in self._by_key())
        return CentredValues(v, self.centre[:, heads], centred, *products)

    def _by_key(self) -> tuple[Tensor, ...]:
        return self.v, self.centred, self.squared_norms, self.centred_squared_norms, self.centred_dots


def subtract_centre(v: Tensor, occupied: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean ``[B, Hkv, 1, D]`` of values ``[B, Hkv, N, D]`` on occupied slots, and the values less this mean.

    ``v`` is 0 on the slots that are not ``occupied`` ``[B, Hkv, N]`` bool, and so is the difference.
    """
    centre = v.sum(2, keepdim=True) / occupied.sum(-1).clamp_min(1)[..., None, None]
    return centre, (v - centre).masked_fill_(~occupied[..., None], 0.0)


#: A statistic of each pair of a query and a key, from weights, logits and values. All but the values, and the result,
#: are ``[B, H, w, N]``; logits are scaled, and 0 where the query does not see the key.
Statistic = Callable[[Tensor, Tensor, CentredValues], Tensor]

#: Statistics whose sums over queries a kernel computes: ``sum`` adds the weights (None), ``squares`` their squares,
#: which are then multiplied by ``||v||^2`` (ag/engine/wrappers/obcache.py adds that entry).
FUSED: dict[Statistic | None, Kind] = {None: "sum"}


def attention_rows(
    logits: Tensor,
    statistic: Statistic | None = None,
    values: CentredValues | None = None,
    open_until: int = 0,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Return the attention weights of some queries, or a statistic of them, ``[B, H, w, N]``.

    Args:
        logits: scaled ``[B, H, w, N]``, -inf where the query does not see the key; the weight there is 0.
        statistic: None: the weights.
        values: of the N keys, for a statistic.
        open_until: every query sees the keys before this one.
        sink_logits: ``[H]``, the model's sink logit of each head, which acts as one more key whose value is 0. None:
            the model has no sink logits.
    """
    num_keys = logits.shape[-1]
    if sink_logits is not None:
        column = sink_logits.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
    weights = logits.softmax(-1)
    if not open_until:  # some query may see no key
        weights = weights.masked_fill(logits == -INF, 0.0)
    if statistic is None:
        return weights[..., :num_keys]
    assert values is not None
    logits = logits.clone()
    maybe_hidden = logits[..., open_until:]
    maybe_hidden.masked_fill_(maybe_hidden == -INF, 0.0)
    if sink_logits is not None:
        values = values.with_zero_value()
    return statistic(weights, logits, values)[..., :num_keys]


def sum_over_queries(rows: Tensor, query_valid: Tensor) -> Tensor:
    """Sum ``[B, H, w, N]`` over the queries that exist, ``query_valid`` ``[B, w]`` bool; returns ``[B, H, N]``."""
    return (query_valid[:, None, None].to(rows.dtype) @ rows)[:, :, 0]


def moments_over_queries(rows: Tensor, query_valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the unbiased variance of ``[B, H, w, N]`` over the queries that exist, ``[B, H, N]`` each.

    ``query_valid`` ``[B, w]`` is bool. The variance over a single query is 0.
    """
    count = query_valid.sum(1)[:, None, None].clamp_min(1)  # a sequence that has ended has no queries
    mean = sum_over_queries(rows, query_valid) / count
    squares = sum_over_queries((rows - mean[:, :, None]).square_(), query_valid)
    return mean, squares / (count - 1).clamp_min(1)
