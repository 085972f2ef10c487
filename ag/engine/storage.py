"""Ragged storage of keys and values: each (sequence, KV head) holds as many tokens as it kept.

A row is one (sequence, KV head) pair, row ``b * Hkv + h``. The rows lie one after the other in a flat buffer, each with
a little slack, so that decoding appends in place; see :class:`ag.engine.layout.Layout`. What is evicted leaves a gap,
which the side of the row closes where fewer tokens have to move; when much is gone the buffer is laid out anew.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ag.engine.layout import Layout, sent, slack


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
        self.keys = key.new_empty(0, key.shape[-1])
        self.values = value.new_empty(0, value.shape[-1])
        self.ranks = torch.empty(0, dtype=torch.int32, device=key.device)
        self.fleeting = torch.empty(0, dtype=torch.bool, device=key.device)
        self.layout = Layout(batch * kv_heads, key.device)
        self._marks = False  # whether some token was ever fleeting

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row, ``[R]`` long, on the CPU."""
        return self.layout.lengths

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Where the rows start and how long they are, ``[R]`` long each, on the device of the keys."""
        return self.layout.rows

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
        length = shape[2]
        ranks = ranks[:, None].expand(shape).flatten().int()
        k, v = k.flatten(0, 2), v.flatten(0, 2)
        marks = None if fleeting is None else fleeting.flatten()
        if keep is None:
            if length > self.layout.room:
                self._lay_out(self.lengths + length)
            slots = self.rows[0] + self.rows[1]
            if length > 1:
                slots = (slots[:, None] + torch.arange(length, device=k.device)).flatten()
        else:
            keep = keep.expand(shape).flatten(0, 1)
            lengths = self.lengths + keep.sum(1).cpu()
            if not self.layout.fits(lengths):
                self._lay_out(lengths)
            chosen = keep.flatten()
            slots = ((self.rows[0] + self.rows[1])[:, None] + keep.cumsum(1) - 1).flatten()[chosen]
            k, v, ranks = k[chosen], v[chosen], ranks[chosen]
            marks = None if marks is None else marks[chosen]
        self.keys.index_copy_(0, slots, k)
        self.values.index_copy_(0, slots, v)
        self.ranks.index_copy_(0, slots, ranks)
        if marks is not None or self._marks:
            self._marks = True
            self.fleeting[slots] = False if marks is None else marks
        if keep is None:
            self.layout.grow(length)
        else:
            self.layout.settle(self.layout.starts, lengths)

    def padded(self) -> Rows:
        """Return everything stored.

        Rows of equal length are a view of the storage; others are gathered, so that the memory of one layer is needed
        for a moment.
        """
        parts = (self.keys, self.values, self.ranks, self.fleeting)
        longest = int(self.lengths.max())
        step, count = self.layout.step, len(self.lengths)
        if step is not None:
            first = int(self.layout.starts[0])
            keys, values, ranks, fleeting = (
                x.as_strided((count, longest, *x.shape[1:]), (step * x.stride(0), *x.stride()), first * x.stride(0))
                for x in parts
            )
            return Rows(keys, values, ranks, fleeting, None)
        index, valid = self.layout.index(longest)
        keys, values, ranks, fleeting = (x[index] for x in parts)
        return Rows(keys, values, ranks, fleeting, valid)

    def count_below(self, ranks: Tensor) -> Tensor:
        """Return how many tokens at the start of each row have a rank below ``ranks[b]`` ``[B]``, ``[R]`` long."""
        index, valid = self.layout.index(int(self.lengths.max()))
        limit = ranks.repeat_interleave(self.kv_heads).to(index.device)
        return (valid & (self.ranks[index] < limit[:, None])).sum(1)

    def retain(self, keep: Tensor) -> bool:
        """Keep the tokens where ``keep`` ``[R, N]`` (laid out as :meth:`padded`) is True and free the others.

        Returns whether there were others.
        """
        index, valid = self.layout.index(keep.shape[1])
        keep = keep & valid
        lengths = keep.sum(1).cpu()
        held = int(lengths.sum())
        if held == int(self.lengths.sum()):
            return False
        if self.layout.loose(lengths):
            self._move(index[keep], lengths)
        else:
            self._close(index, keep, lengths)
        return True

    def drop_fleeting(self, ranks: Tensor) -> bool:
        """Free the fleeting tokens whose rank is below ``ranks[b]`` ``[B]``; returns whether others are left."""
        index, valid = self.layout.index(int(self.lengths.max()))
        fleeting = self.fleeting[index] & valid
        gone = fleeting & (self.ranks[index] < ranks.repeat_interleave(self.kv_heads).to(index.device)[:, None])
        if bool(gone.any()):
            self.retain(~gone)
        return bool((fleeting & ~gone).any())

    def select_sequences(self, chosen: Tensor) -> None:
        """Replace the sequences by those at the indices ``chosen`` (beam search, repeated inputs)."""
        heads = torch.arange(self.kv_heads)
        rows = (chosen.cpu()[:, None] * self.kv_heads + heads).flatten()
        index, valid = self.layout.index(int(self.lengths.max()))
        picked = rows.to(index.device)
        self.batch = len(chosen)
        self._move(index[picked][valid[picked]], self.lengths[rows])

    def crop(self, ranks: Tensor) -> None:
        """Drop, at the end of every row, the tokens whose rank is not below ``ranks[b]`` ``[B]``."""
        self.layout.settle(self.layout.starts, self.count_below(ranks).cpu())
        if self.layout.loose(self.lengths):
            self._lay_out(self.lengths)

    def _lay_out(self, lengths: Tensor) -> None:
        """Lay the buffer out anew for rows of these lengths."""
        self._move(self.layout.tokens(), self.lengths, lengths)

    def _move(self, slots: Tensor, lengths: Tensor, room: Tensor | None = None) -> None:
        """Copy the tokens at ``slots`` (row after row, ``lengths`` of them each) into a new buffer with slack."""
        room = lengths if room is None else room
        capacities = room + slack(room)
        limits = capacities.cumsum(0)
        starts = limits - capacities
        total, device = int(capacities.sum()), self.keys.device
        shift, held = (sent(x, device) for x in (starts - (lengths.cumsum(0) - lengths), lengths))
        first = torch.repeat_interleave(shift, held, output_size=len(slots))
        source = torch.zeros(total, dtype=torch.long, device=device)  # free slots: of any token
        source[first + torch.arange(len(slots), device=device)] = slots
        for name in ("keys", "values", "ranks", "fleeting"):
            old: Tensor = getattr(self, name)
            new = old.index_select(0, source) if len(old) else old.new_zeros(total, *old.shape[1:])
            setattr(self, name, new)
        self.layout.settle(starts, lengths, limits)

    def _close(self, index: Tensor, keep: Tensor, lengths: Tensor) -> None:
        """Close the gaps between the kept tokens from the side, the same for all rows, where fewer have to move."""
        place = self.rows[0][:, None] + keep.cumsum(1) - 1
        later = place + (self.rows[1] - lengths.to(index.device))[:, None]  # so that a row ends where it ended
        down, up = keep & (place != index), keep & (later != index)
        to_end = int(up.sum()) < int(down.sum())
        moving, target = (up, later) if to_end else (down, place)
        source, target = index[moving], target[moving]
        for x in (self.keys, self.values, self.ranks, *([self.fleeting] if self._marks else [])):
            x.index_copy_(0, target, x.index_select(0, source))
        starts = self.layout.starts
        self.layout.settle(starts + (self.lengths - lengths) if to_end else starts, lengths)
