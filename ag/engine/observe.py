"""What a layer shows when something has to go: attention rows, logits and outputs, in float32, on demand.

One :class:`Observation` serves all parts of a policy. Nothing here has n^2 memory: all queries are visited in blocks,
and whole rows exist only for a window of the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # queries visited at once


@dataclass(frozen=True)
class AttentionRows:
    """Some queries against all held keys: w queries, N keys.

    Attributes:
        a: weights ``[B, H, w, N]``, a softmax over what the query sees; 0 on the rest.
        s: scaled logits ``[B, H, w, N]``; 0 where the query does not see the key.
        visible: ``[B, H, w, N]`` bool, whether it does.
        o: outputs ``[B, H, w, D]``.
        v: values ``[B, Hkv, N, D]``.
        counted: ``[B, w]`` bool, the queries that exist.
    """

    a: Tensor
    s: Tensor
    visible: Tensor
    o: Tensor
    v: Tensor
    counted: Tensor

    def total(self, statistic: Callable[[AttentionRows], Tensor]) -> Tensor:
        """Sum a statistic ``[B, H, w, N]`` over the queries, ``[B, H, N]``."""
        return (statistic(self) * self.counted[:, None, :, None]).sum(2)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the mean and the unbiased variance of the weights over the queries, ``[B, H, N]`` each."""
        counted = self.counted[:, None, :, None]
        number = counted.sum(2)
        mean = (self.a * counted).sum(2) / number
        squares = ((self.a - mean[:, :, None]).square() * counted).sum(2)
        return mean, squares / (number - 1).clamp_min(1)

    def dot_outputs(self) -> Tensor:
        """Return ``<o_i, v_p>``, ``[B, H, w, N]``."""
        batch, heads, rows, dim = self.o.shape
        kv_heads = self.v.shape[1]
        grouped = self.o.reshape(batch, kv_heads, -1, dim)
        return (grouped @ self.v.mT).view(batch, heads, rows, -1)

    def value_norms(self) -> Tensor:
        """Return ``||v_p||^2`` by query head, ``[B, H, 1, N]``."""
        norms = self.v.square().sum(-1)
        return norms.repeat_interleave(self.a.shape[1] // norms.shape[1], 1)[:, :, None]


Statistic = Callable[[AttentionRows], Tensor]


def attention(rows: AttentionRows) -> Tensor:
    """``A``: what a key is paid."""
    return rows.a


class Observation:
    """Queries of one layer against the keys it holds.

    Args:
        q: queries ``[B, H, T, D]``, post-RoPE.
        k: held keys ``[B, Hkv, N, D]``, those of the queries' own tokens among them.
        v: held values ``[B, Hkv, N, D]``.
        scaling: factor of the logits.
        query_ranks: ``[B, T]`` long, the place of each query among its sequence's own tokens.
        key_ranks: ``[B, Hkv, N]`` long.
        query_valid: ``[B, T]`` bool, False on padding.
        key_valid: ``[B, Hkv, N]`` bool, False on free slots.
        layer: index of the layer.
        window: sliding window of the model, or None.
        gate: probabilities ``[B, Hkv, N]`` of the layer's gate, or None.
        new: how many of the queries, at the end, were not shown before; None: all.
        memory: what scorers recorded at earlier observations, tensors ``[..., N]`` whose last dimension is that of
            the keys (new tokens have 0); what they record now goes there too.
        prompt_lengths: ``[B]`` long, own tokens of each prompt as far as they are known; None: all tokens seen.
        decoding: whether the prompt is over.
        memo: where measurements are remembered, so that each is made once.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        query_ranks: Tensor,
        key_ranks: Tensor,
        query_valid: Tensor,
        key_valid: Tensor,
        layer: int = 0,
        window: int | None = None,
        gate: Tensor | None = None,
        new: int | None = None,
        memory: dict[str, Tensor] | None = None,
        prompt_lengths: Tensor | None = None,
        decoding: bool = False,
        memo: dict[Hashable, Any] | None = None,
    ) -> None:
        self.layer, self.gate, self.decoding = layer, gate, decoding
        self.new = q.shape[2] if new is None else new
        self.memory = {} if memory is None else memory
        self._memo = {} if memo is None else memo
        self._prompt_lengths = prompt_lengths
        self.q, self.k, self.scaling, self.window = q, k, scaling, window
        self.query_ranks, self.key_ranks = query_ranks, key_ranks
        self.query_valid, self.key_valid = query_valid, key_valid
        self._v = v

    @property
    def group(self) -> int:
        """Query heads a KV head, G."""
        return self.q.shape[1] // self.k.shape[1]

    @cached_property
    def v(self) -> Tensor:
        """Values ``[B, Hkv, N, D]`` float32, 0 on free slots."""
        return self._v.float().masked_fill(~self.key_valid[..., None], 0.0)

    @cached_property
    def _keys(self) -> Tensor:
        return self.k.float()

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens each sequence has seen, ``[B]``: one more than the rank of its newest query."""
        return self.query_ranks.masked_fill(~self.query_valid, -1).amax(1) + 1

    @property
    def prompt_lengths(self) -> Tensor:
        """Own tokens of each prompt, ``[B]``, which shares of a budget refer to."""
        return self.lengths if self._prompt_lengths is None else self._prompt_lengths

    @cached_property
    def age(self) -> Tensor:
        """``[B, Hkv, N]`` long: 0 for the newest token of a sequence, 1 for the one before; any on free slots."""
        return self.lengths[:, None, None] - 1 - self.key_ranks

    def over_layer(self, values: Tensor) -> Tensor:
        """Average ``[B, H, N]`` over all query heads by token, and give it to each KV head, ``[B, Hkv, N]``.

        Heads may hold different tokens; one that no longer holds a token contributes 0 for it.
        """
        kv_heads, tokens = self.k.shape[1], int(self.lengths.max())
        places = self.key_ranks.clamp(0, tokens - 1)
        values = values.unflatten(1, (kv_heads, -1)).sum(2).masked_fill(~self.key_valid, 0.0)
        by_token = values.new_zeros(len(values), tokens)
        by_token.scatter_add_(1, places.flatten(1), values.flatten(1))
        return (by_token[:, None].expand(-1, kv_heads, -1) / self.q.shape[1]).gather(2, places)

    def rows(self, last: int) -> AttentionRows:
        """Return the last ``last`` queries of each sequence, or as many as there are, oldest first."""
        if ("rows", last) not in self._memo:
            newest = self.query_valid & (self.query_ranks >= (self.lengths - last)[:, None])
            width = min(last, self.q.shape[2])
            order = torch.where(newest, self.query_ranks, -1).argsort(dim=1, stable=True)[:, -width:]
            self._memo["rows", last] = self._rows(order)
        rows: AttentionRows = self._memo["rows", last]
        return rows

    def total(self, statistic: Statistic = attention) -> Tensor:
        """Sum a statistic ``[B, H, w, N]`` over all new queries, ``[B, H, N]``."""
        if ("total", statistic) not in self._memo:
            total = self.q.new_zeros(*self.q.shape[:2], self.k.shape[2], dtype=torch.float32)
            for rows in self._blocks():
                total += rows.total(statistic)
            self._memo["total", statistic] = total
        summed: Tensor = self._memo["total", statistic]
        return summed

    def accumulated(self, name: str, new: Tensor) -> Tensor:
        """Add ``[..., N]`` to what was recorded under a name; returns and records the sum."""
        if name in self.memory:
            new = new + self.memory[name]
        self.memory[name] = new
        return new

    def latest(self, name: str, new: Tensor, counted: Tensor, last: int) -> Tensor:
        """Record rows ``[B, H, w, N]`` after those recorded before; returns and keeps the last ones.

        Args:
            name: what they are recorded under.
            new: rows, 0 where nothing counts.
            counted: ``[B, w]`` bool, the rows that exist, which are a sequence's last ones.
            last: rows to keep of each sequence.
        """
        if name in self.memory:
            before = self.memory[name].shape[2]
            new = torch.cat([self.memory[name], new], 2)
            # a sequence with fewer new rows than others keeps more of the earlier ones, right before the new ones
            missing = (~counted).sum(1, keepdim=True)
            columns = torch.arange(new.shape[2], device=new.device)
            order = torch.where(columns < before + missing, (columns - missing) % (before + missing), columns)
            new = new.gather(2, order[:, None, :, None].expand_as(new))
        self.memory[name] = new[:, :, -last:]
        return self.memory[name]

    def _blocks(self) -> Iterator[AttentionRows]:
        columns = torch.arange(self.q.shape[2] - self.new, self.q.shape[2], device=self.q.device)
        for block in columns.split(BLOCK):
            yield self._rows(block.expand(len(self.q), -1))

    def _rows(self, columns: Tensor) -> AttentionRows:
        """Return the queries in ``columns`` ``[B, w]``."""
        batch, heads, _, dim = self.q.shape
        width = columns.shape[1]
        q = self.q.gather(2, columns[:, None, :, None].expand(batch, heads, width, dim)).float()
        ranks, counted = self.query_ranks.gather(1, columns), self.query_valid.gather(1, columns)
        s = q.view(batch, self.k.shape[1], -1, dim) @ self._keys.mT * self.scaling
        s = s.view(batch, self.k.shape[1], self.group, width, -1)
        distance = ranks[:, None, :, None] - self.key_ranks[:, :, None]
        visible = (distance >= 0) & self.key_valid[:, :, None]
        if self.window is not None:
            visible = visible & (distance < self.window)
        hidden = ~visible[:, :, None]
        a = s.masked_fill(hidden, float("-inf")).softmax(-1)
        a = a.masked_fill(hidden, 0.0)  # also the rows that see nothing
        o = (a.flatten(2, 3) @ self.v).view(batch, heads, width, dim)
        a, s = a.view(batch, heads, width, -1), s.masked_fill(hidden, 0.0).view(batch, heads, width, -1)
        visible = visible[:, :, None].expand(-1, -1, self.group, -1, -1).reshape(batch, heads, width, -1)
        return AttentionRows(a, s, visible, o, self.v, counted)
