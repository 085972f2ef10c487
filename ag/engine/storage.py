"""Ragged storage of keys and values: each (sequence, KV head) holds as many tokens as it kept.

A row is one (sequence, KV head) pair, row ``b * Hkv + h``. The rows lie one after the other in a flat buffer, each with
a little slack, so that decoding appends in place; when a row is full the buffer is laid out anew with fresh slack. What
is evicted later leaves a gap, which the shorter side of the rows closes; when much is gone the buffer is laid out anew.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SLACK_TOKENS = 16  # free slots a row gets at least when the buffer is laid out
SLACK_SHARE = 16  # and one more for each so many tokens that it holds
LOOSE_SHARE = 32  # one token too many for each so many that are held, and the buffer is laid out anew


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
        self._limits = torch.zeros(rows, dtype=torch.long)  # where the slots of each row end
        self._marks = False  # whether some token was ever fleeting
        zeros = torch.zeros(rows, dtype=torch.long)
        self._settle(zeros, zeros)

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
        lengths = self.lengths + length
        if keep is None:
            if length > self._room:
                self._lay_out(lengths)
            slots = self.rows[0] + self.rows[1]
            if length > 1:
                slots = (slots[:, None] + torch.arange(length, device=k.device)).flatten()
        else:
            keep = keep.expand(shape).flatten(0, 1)
            lengths = self.lengths + keep.sum(1).cpu()
            if bool((self.starts + lengths > self._limits).any()):
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
            self._grow(lengths, length)
        else:
            self._settle(self.starts, lengths)

    def padded(self) -> Rows:
        """Return everything stored.

        Rows of equal length are a view of the storage; others are gathered, so that the memory of one layer is needed
        for a moment.
        """
        parts = (self.keys, self.values, self.ranks, self.fleeting)
        longest = int(self.lengths.max())
        if self._step is not None:
            first, step, count = int(self.starts[0]), self._step, len(self.starts)
            keys, values, ranks, fleeting = (
                x.as_strided((count, longest, *x.shape[1:]), (step * x.stride(0), *x.stride()), first * x.stride(0))
                for x in parts
            )
            return Rows(keys, values, ranks, fleeting, None)
        index, valid = self._index(longest)
        keys, values, ranks, fleeting = (x[index] for x in parts)
        return Rows(keys, values, ranks, fleeting, valid)

    def count_below(self, ranks: Tensor) -> Tensor:
        """Return how many tokens at the start of each row have a rank below ``ranks[b]`` ``[B]``, ``[R]`` long."""
        index, valid = self._index(int(self.lengths.max()))
        limit = ranks.repeat_interleave(self.kv_heads).to(index.device)
        return (valid & (self.ranks[index] < limit[:, None])).sum(1)

    def retain(self, keep: Tensor) -> bool:
        """Keep the tokens where ``keep`` ``[R, N]`` (laid out as :meth:`padded`) is True and free the others.

        Returns whether there were others.
        """
        index, valid = self._index(keep.shape[1])
        keep = keep & valid
        lengths = keep.sum(1).cpu()
        held = int(lengths.sum())
        if held == int(self.lengths.sum()):
            return False
        if self._loose(lengths):
            self._move(index[keep], lengths)
        else:
            self._close(index, keep, lengths)
        return True

    def drop_fleeting(self, ranks: Tensor) -> bool:
        """Free the fleeting tokens whose rank is below ``ranks[b]`` ``[B]``; returns whether others are left."""
        index, valid = self._index(int(self.lengths.max()))
        fleeting = self.fleeting[index] & valid
        gone = fleeting & (self.ranks[index] < ranks.repeat_interleave(self.kv_heads).to(index.device)[:, None])
        if bool(gone.any()):
            self.retain(~gone)
        return bool((fleeting & ~gone).any())

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
        self._settle(self.starts, self.count_below(ranks).cpu())
        if self._loose(self.lengths):
            self._lay_out(self.lengths)

    def _index(self, longest: int) -> tuple[Tensor, Tensor]:
        """Return the slots ``[R, N]`` of all tokens (clamped where a row is shorter) and their validity."""
        device = self.keys.device
        offset = torch.arange(longest, device=device)
        lengths = self.rows[1][:, None]
        valid = offset < lengths
        index = self.rows[0][:, None] + offset.where(valid, lengths.clamp_min(1) - 1)
        return index.clamp_max(max(len(self.keys) - 1, 0)), valid

    def _loose(self, lengths: Tensor) -> bool:
        """Tell whether a buffer for rows of these lengths would be noticeably smaller."""
        held = int(lengths.sum())
        return len(self.keys) > held + int(_slack(lengths).sum()) + held // LOOSE_SHARE

    def _lay_out(self, lengths: Tensor) -> None:
        """Lay the buffer out anew for rows of these lengths."""
        total, (starts, held) = int(self.lengths.sum()), self.rows
        first = torch.repeat_interleave(starts - (held.cumsum(0) - held), held, output_size=total)
        self._move(first + torch.arange(total, device=first.device), self.lengths, lengths)

    def _move(self, slots: Tensor, lengths: Tensor, room: Tensor | None = None) -> None:
        """Copy the tokens at ``slots`` (row after row, ``lengths`` of them each) into a new buffer with slack."""
        room = lengths if room is None else room
        capacities = room + _slack(room)
        limits = capacities.cumsum(0)
        starts = limits - capacities
        total, device = int(capacities.sum()), self.keys.device
        shift, held = (_sent(x, device) for x in (starts - (lengths.cumsum(0) - lengths), lengths))
        first = torch.repeat_interleave(shift, held, output_size=len(slots))
        source = torch.zeros(total, dtype=torch.long, device=device)  # free slots: of any token
        source[first + torch.arange(len(slots), device=device)] = slots
        for name in ("keys", "values", "ranks", "fleeting"):
            old: Tensor = getattr(self, name)
            new = old.index_select(0, source) if len(old) else old.new_zeros(total, *old.shape[1:])
            setattr(self, name, new)
        self._limits = limits
        self._settle(starts, lengths)

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
        self._settle(self.starts + (self.lengths - lengths) if to_end else self.starts, lengths)

    def _settle(self, starts: Tensor, lengths: Tensor) -> None:
        """Take note of where the rows are now."""
        self.starts, self.lengths = starts, lengths
        device = self.keys.device
        #: Starts and lengths on the device of the keys, ``[R]`` long each.
        self.rows = _sent(starts, device), _sent(lengths, device)
        self._room = int((self._limits - starts - lengths).min())
        steps = starts.diff()
        even = bool((lengths == lengths[0]).all()) and bool((steps == steps[:1]).all())
        #: Slots from one row to the next where rows are equally long and evenly spaced, else None.
        self._step = None if not even else int(steps[0]) if len(steps) else len(self.keys)

    def _grow(self, lengths: Tensor, more: int) -> None:
        """Take note that each row has ``more`` tokens more; nothing waits for the device."""
        on_device = lengths if self.keys.device.type == "cpu" else self.rows[1] + more
        self.lengths, self.rows = lengths, (self.rows[0], on_device)
        self._room -= more


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU to a device without waiting for it: pageable memory is staged before the call returns."""
    return x.to(device, non_blocking=device.type == "cuda")


def _slack(lengths: Tensor) -> Tensor:
    """Return the free slots that rows of these lengths get."""
    return torch.clamp(lengths // SLACK_SHARE, min=SLACK_TOKENS)
