"""Ragged storage of keys and values: each (sequence, KV head) holds as many tokens as it kept.

A row is one (sequence, KV head) pair, row ``b * Hkv + h``. The rows lie one after the other in a flat buffer, each with
a little slack, so that decoding appends in place; when a row is full the buffer is laid out anew with fresh slack.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SLACK_TOKENS = 16  # free slots a row gets at least when the buffer is laid out
SLACK_SHARE = 16  # and one more for each so many tokens that it holds


class Rows(NamedTuple):
    """What a store holds, rows padded to the longest one, N tokens."""

    keys: Tensor  # [R, N, D]
    values: Tensor  # [R, N, D]
    ranks: Tensor  # [R, N], rank of each token among its sequence's own tokens
    fleeting: Tensor  # [R, N] bool, tokens that go once they are no longer recent
    valid: Tensor | None  # [R, N] bool; None when every row has N tokens


class RaggedStore:
    """Keys and values of one layer.

    Args:
        batch: sequences B.
        kv_heads: KV heads Hkv.
        key: any tensor ``[..., D]`` with the keys' size, type and device.
        value: the same for the values.
    """

    def __init__(self, batch: int, kv_heads: int, key: Tensor, value: Tensor) -> None:
        self.batch, self.kv_heads = batch, kv_heads
        rows = batch * kv_heads
        self.keys = key.new_empty(0, key.shape[-1])
        self.values = value.new_empty(0, value.shape[-1])
        self.ranks = torch.empty(0, dtype=torch.int32, device=key.device)
        self.fleeting = torch.empty(0, dtype=torch.bool, device=key.device)
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self._capacities = torch.zeros(rows, dtype=torch.long)
        self._starts = torch.zeros(rows, dtype=torch.long)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, slack included."""
        return self.keys.nbytes + self.values.nbytes

    def append(self, k: Tensor, v: Tensor, ranks: Tensor, keep: Tensor | None, fleeting: Tensor | None = None) -> None:
        """Add new tokens at the ends of the rows.

        Args:
            k: keys ``[B, Hkv, T, D]``.
            v: values ``[B, Hkv, T, D]``.
            ranks: ``[B, T]`` rank of each token in its sequence.
            keep: ``[B, Hkv or 1, T]`` bool, which of them to store; None stores all.
            fleeting: ``[B, Hkv, T]`` bool, stored tokens that :meth:`retain` will drop later; None: none.
        """
        shape = k.shape[:3]
        ranks = ranks[:, None].expand(shape).flatten(0, 1)
        count = torch.full((shape[0] * shape[1],), shape[2])
        offset = torch.arange(shape[2], device=k.device).expand(len(count), -1)
        if keep is not None:
            keep = keep.expand(shape).flatten(0, 1)
            count = keep.sum(1).cpu()
            offset = keep.cumsum(1) - 1
        self._reserve(self.lengths + count)
        slots = (self._starts + self.lengths).to(k.device)[:, None] + offset
        chosen = slice(None) if keep is None else keep.flatten()
        slots = slots.flatten()[chosen]
        self.keys[slots] = k.flatten(0, 2)[chosen]
        self.values[slots] = v.flatten(0, 2)[chosen]
        self.ranks[slots] = ranks.flatten()[chosen].int()
        self.fleeting[slots] = False if fleeting is None else fleeting.flatten()[chosen]
        self.lengths = self.lengths + count

    def padded(self) -> Rows:
        """Return everything stored.

        Rows of equal length are a view of the storage; others are gathered, so that the memory of one layer is needed
        for a moment.
        """
        parts = (self.keys, self.values, self.ranks, self.fleeting)
        rows, longest = len(self.lengths), int(self.lengths.max())
        if bool((self.lengths == longest).all()) and bool((self._capacities == self._capacities[0]).all()):
            capacity = int(self._capacities[0])
            keys, values, ranks, fleeting = (x.view(rows, capacity, *x.shape[1:])[:, :longest] for x in parts)
            return Rows(keys, values, ranks, fleeting, None)
        index, valid = self._index(longest)
        keys, values, ranks, fleeting = (x[index] for x in parts)
        return Rows(keys, values, ranks, fleeting, valid)

    def retain(self, keep: Tensor) -> None:
        """Keep the tokens where ``keep`` ``[R, N]`` (laid out as :meth:`padded`) is True and free the others."""
        index, valid = self._index(keep.shape[1])
        keep = keep & valid
        self._move(index[keep], keep.sum(1).cpu())

    def select_sequences(self, chosen: Tensor) -> None:
        """Replace the sequences by those at the indices ``chosen`` (beam search, repeated inputs)."""
        heads = torch.arange(self.kv_heads)
        rows = (chosen.cpu()[:, None] * self.kv_heads + heads).flatten()
        index, valid = self._index(int(self.lengths.max()))
        picked = rows.to(index.device)
        self.batch = len(chosen)
        self._move(index[picked][valid[picked]], self.lengths[rows])

    def crop(self, ranks: Tensor) -> None:
        """Drop, at the end of every row, the tokens whose rank is not below ``ranks[b]`` ``[B]``."""
        index, valid = self._index(int(self.lengths.max()))
        limit = ranks.repeat_interleave(self.kv_heads).to(index.device)
        self.lengths = (valid & (self.ranks[index] < limit[:, None])).sum(1).cpu()

    def _index(self, longest: int) -> tuple[Tensor, Tensor]:
        """Return the slots ``[R, N]`` of all tokens (clamped where a row is shorter) and their validity."""
        device = self.keys.device
        offset = torch.arange(longest, device=device)
        lengths = self.lengths.to(device)[:, None]
        valid = offset < lengths
        index = self._starts.to(device)[:, None] + offset.where(valid, lengths.clamp_min(1) - 1)
        return index.clamp_max(max(len(self.keys) - 1, 0)), valid

    def _reserve(self, lengths: Tensor) -> None:
        """Make room for rows of these lengths, laying the buffer out anew when one of them would overflow."""
        if bool((lengths > self._capacities).any()):
            index, valid = self._index(int(self.lengths.max()))
            self._move(index[valid], self.lengths, lengths)

    def _move(self, slots: Tensor, lengths: Tensor, room: Tensor | None = None) -> None:
        """Copy the tokens at ``slots`` (row after row, ``lengths`` of them each) into a new buffer with slack."""
        room = lengths if room is None else room
        capacities = room + torch.clamp(room // SLACK_SHARE, min=SLACK_TOKENS)
        starts = capacities.cumsum(0) - capacities
        total, device = int(capacities.sum()), self.keys.device
        first = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths).to(device)
        target = first + torch.arange(len(slots), device=device)
        for name in ("keys", "values", "ranks", "fleeting"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(total, *old.shape[1:])
            new[target] = old[slots]
            setattr(self, name, new)
        self.lengths, self._capacities, self._starts = lengths.clone(), capacities, starts
