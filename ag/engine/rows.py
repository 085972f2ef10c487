"""Some rows of a layer's attention: weights, logits, outputs and their statistics, in float32, on demand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from ag.kernels.row_statistics import Values, best_version, row_statistics
from ag.kernels.row_statistics.reference import Kind, pair_statistics


class AttentionRows:
    """Some queries against held keys: w queries, N keys. Everything is computed when it is asked for.

    Args:
        logits: scaled ``[B, H, w, N]``, ``-inf`` where the query does not see the key.
        values: gives those of the keys, ``[B, Hkv, N, D]`` with H a multiple of Hkv.
        counted: ``[B, w]`` bool, the queries that exist.
        open_until: keys before this one are seen by every query.
        outputs: gives them, less the values' centre, ``[B, H, w, D]`` in the type of the logits, or None.
    """

    def __init__(
        self,
        logits: Tensor,
        values: Callable[[], Values],
        counted: Tensor,
        open_until: int = 0,
        outputs: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        self._make_values, self.counted = values, counted
        self._logits, self._open_until, self._outputs = logits, open_until, outputs
        self._averaged = False  # whether the weights are means, and not those of the logits

    @cached_property
    def values(self) -> Values:
        """Values of the keys, centred."""
        return self._make_values()

    @cached_property
    def a(self) -> Tensor:
        """Weights ``[B, H, w, N]``, a softmax over what the query sees; 0 on the rest."""
        a = self._logits.softmax(-1)
        return a if self._open_until else a.masked_fill(~self.visible, 0.0)  # some row may see nothing

    @cached_property
    def s(self) -> Tensor:
        """Scaled logits ``[B, H, w, N]``; 0 where the query does not see the key."""
        s = self._logits.clone()
        s[..., self._open_until :].masked_fill_(self._hidden, 0.0)
        return s

    @cached_property
    def _hidden(self) -> Tensor:
        """``[B, H, w, N - open_until]`` bool, the pairs that are not visible."""
        return self._logits[..., self._open_until :] == float("-inf")

    @cached_property
    def visible(self) -> Tensor:
        """``[B, H, w, N]`` bool, whether the query sees the key."""
        visible = torch.ones_like(self._logits, dtype=torch.bool)
        visible[..., self._open_until :] = ~self._hidden
        return visible

    @cached_property
    def o(self) -> Tensor:
        """Outputs ``[B, H, w, D]``."""
        v = self.values.v
        batch, heads, rows, keys = self.a.shape
        return (self.a.reshape(batch, v.shape[1], -1, keys) @ v).view(batch, heads, rows, -1)

    def statistic(self, kind: Kind) -> Tensor:
        """Return a statistic of every pair, ``[B, H, w, N]``; see :mod:`ag.kernels.row_statistics`."""
        return pair_statistics(kind, self.a, self.s, self.values)

    def total(self, statistic: Callable[[AttentionRows], Tensor]) -> Tensor:
        """Sum a statistic ``[B, H, w, N]`` over the queries, ``[B, H, N]``; those in ``FUSED`` in one pass."""
        kind = None if self._averaged else FUSED.get(statistic)
        if kind is None or best_version(self._logits) == "reference":
            return self._sum(statistic(self))
        if kind == "attention":
            return row_statistics(kind, self._logits, self.counted)
        return row_statistics(kind, self._logits, self.counted, self.values, self._outputs())

    def _sum(self, values: Tensor) -> Tensor:
        return (self.counted[:, None, None].to(values.dtype) @ values)[:, :, 0]

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """The mean and the unbiased variance of the weights over the queries, ``[B, H, N]`` each."""
        number = self.counted.sum(1)[:, None, None]
        mean = self._sum(self.a) / number
        squares = self._sum((self.a - mean[:, :, None]).square_())
        return mean, squares / (number - 1).clamp_min(1)

    def mean_heads(self) -> AttentionRows:
        """Return rows whose weights and logits are the means over the query heads of each KV head."""
        group = self._logits.shape[1] // self.values.v.shape[1]
        a, s = (x.unflatten(1, (-1, group)).mean(2) for x in (self.a, self.s))
        rows = AttentionRows(s, self._make_values, self.counted)
        vars(rows).update(a=a, s=s, _averaged=True)  # as if computed
        return rows


Statistic = Callable[[AttentionRows], Tensor]


def attention(rows: AttentionRows) -> Tensor:
    """``A``: the attention weight on a key."""
    return rows.a


#: Statistics that ag.kernels.row_statistics can sum in one pass, and their names there.
FUSED: dict[Statistic, Kind] = {attention: "attention"}
