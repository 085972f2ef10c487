"""Some rows of a layer's attention: weights, logits, outputs and their statistics, in float32, on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ag.kernels.attention_stats import Kind


@dataclass(frozen=True)
class Values:
    """Values of keys, and what statistics read of each: computed once, for all tiles.

    A difference ``v_p - o_i`` does not change when the same vector is taken from all values. Its expansion in products
    does: their rounding errors grow with the distance of the values from the origin. So products use ``v - centre``.

    Attributes:
        v: values ``[B, Hkv, N, D]``, 0 on free slots.
        centre: mean of the values in use ``[B, Hkv, 1, D]``.
        centred: ``v - centre``, 0 on free slots.
        norms: ``||v||^2``, ``[B, Hkv, N]``.
        spread: ``||v - centre||^2``, ``[B, Hkv, N]``.
        along: ``<v, v - centre>``, ``[B, Hkv, N]``.
    """

    v: Tensor
    centre: Tensor
    centred: Tensor
    norms: Tensor
    spread: Tensor
    along: Tensor

    @classmethod
    def of(cls, v: Tensor, valid: Tensor | None = None) -> Values:
        """Centre values ``[B, Hkv, N, D]``, of which those that are ``valid`` ``[B, Hkv, N]`` bool are in use."""
        used = torch.ones_like(v[..., 0], dtype=torch.bool) if valid is None else valid
        v = v.masked_fill(~used[..., None], 0.0)
        centre = v.sum(2, keepdim=True) / used.sum(-1).clamp_min(1)[..., None, None]
        centred = (v - centre).masked_fill_(~used[..., None], 0.0)
        spread = centred.square().sum(-1)
        return cls(v, centre, centred, v.square().sum(-1), spread, spread + (centred @ centre.mT)[..., 0])

    def with_nothing(self) -> Values:
        """Return the same with one more value, 0, which the centre leaves out."""
        zero, back = torch.zeros_like(self.centre), -self.centre
        none = torch.zeros_like(self.norms[..., :1])
        zeros = zero, back, none, back.square().sum(-1), none
        each = zip((self.v, self.centred, self.norms, self.spread, self.along), zeros, strict=True)
        v, centred, *sums = (torch.cat(pair, 2) for pair in each)
        return Values(v, self.centre, centred, *sums)

    def part(self, heads: slice, keys: slice) -> Values:
        """Return the values of some KV heads and keys, as views."""
        parts = (x[:, heads, keys] for x in (self.v, self.centred, self.norms, self.spread, self.along))
        return Values(next(parts), self.centre[:, heads], *parts)


class AttentionRows:
    """Some queries against held keys: w queries, N keys. Each statistic is computed when it is first read.

    Args:
        logits: scaled ``[B, H, w, N]``, ``-inf`` where the query does not see the key.
        values: gives those of the keys, ``[B, Hkv, N, D]`` with H a multiple of Hkv.
        counted: ``[B, w]`` bool, the queries that exist.
        open_until: keys before this one are seen by every query.
        sinks: ``[H]``, the sink logit of each head, which acts as one more key, the last, whose value is 0. None means
            that the model has none.
    """

    def __init__(
        self,
        logits: Tensor,
        values: Callable[[], Values],
        counted: Tensor,
        open_until: int = 0,
        sinks: Tensor | None = None,
    ) -> None:
        self._make_values, self.counted = values, counted
        self._open_until = open_until
        self._keys, self._beside = logits.shape[-1], sinks is not None
        if sinks is not None:
            column = sinks.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, column], -1)
        self._logits = logits  # [B, H, w, N], or N + 1 with a sink

    @cached_property
    def values(self) -> Values:
        """Values of the keys, centred; with a sink the last one is its own."""
        values = self._make_values()
        return values.with_nothing() if self._beside else values

    @property
    def a(self) -> Tensor:
        """Weights ``[B, H, w, N]``, a softmax over what the query sees; 0 on the rest."""
        return self._a[..., : self._keys]

    @property
    def s(self) -> Tensor:
        """Scaled logits ``[B, H, w, N]``; 0 where the query does not see the key."""
        return self._s[..., : self._keys]

    @property
    def visible(self) -> Tensor:
        """``[B, H, w, N]`` bool, whether the query sees the key."""
        return (self._logits != float("-inf"))[..., : self._keys]

    @cached_property
    def _a(self) -> Tensor:
        a = self._logits.softmax(-1)
        return a if self._open_until else a.masked_fill(self._logits == float("-inf"), 0.0)  # some row may see nothing

    @cached_property
    def _s(self) -> Tensor:
        s = self._logits.clone()
        masked = s[..., self._open_until :]
        masked.masked_fill_(masked == float("-inf"), 0.0)
        return s

    @cached_property
    def o(self) -> Tensor:
        """Outputs ``[B, H, w, D]``."""
        v = self.values.v
        batch, heads, rows, keys = self._a.shape
        return (self._a.reshape(batch, v.shape[1], -1, keys) @ v).view(batch, heads, rows, -1)

    def pairs(self, statistic: Callable[[Tensor, Tensor, Values], Tensor]) -> Tensor:
        """Return a statistic of every pair ``[B, H, w, N]``, made of weights, logits and values, a sink's too."""
        return statistic(self._a, self._s, self.values)[..., : self._keys]

    def total(self, statistic: Callable[[AttentionRows], Tensor]) -> Tensor:
        """Sum a statistic ``[B, H, w, N]`` over the queries, ``[B, H, N]``."""
        return self._sum(statistic(self))

    def _sum(self, values: Tensor) -> Tensor:
        return (self.counted[:, None, None].to(values.dtype) @ values)[:, :, 0]

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """The mean and the unbiased variance of the weights over the queries, ``[B, H, N]`` each."""
        number = self.counted.sum(1)[:, None, None]
        mean = self._sum(self.a) / number
        squares = self._sum((self.a - mean[:, :, None]).square_())
        return mean, squares / (number - 1).clamp_min(1)


Statistic = Callable[[AttentionRows], Tensor]


def attention(rows: AttentionRows) -> Tensor:
    """``A``: the attention weight on a key."""
    return rows.a


#: Statistics whose sums over queries are made of what ag.kernels.attention_stats sums: of weights, or of their squares,
#: which are then multiplied by ``||v||^2``.
FUSED: dict[Statistic, Kind] = {attention: "sum"}
