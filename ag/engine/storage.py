"""Ragged storage of keys and values: each (sequence, KV head) holds as many tokens as it kept.

A row is one (sequence, KV head) pair, row ``b * Hkv + h``. The rows lie one after the other in a flat buffer, each with
spare slots, so that decoding appends in place; see :class:`ag.engine.layout.Layout`. What is evicted leaves a gap,
which the side of the row closes where fewer tokens have to move; when much is gone the buffer is laid out anew. A
prompt is stored without spare slots, which the first token behind it brings.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ag.engine.layout import Layout, sent, spare_slots
from ag.kernels.row_close import row_close


class Rows(NamedTuple):
    """What a store holds, rows padded to the longest one, N tokens."""

    keys: Tensor  # [R, N, D]
    values: Tensor  # [R, N, D]
    ranks: Tensor  # [R, N], rank of each token among its sequence's own tokens
    valid: Tensor | None  # [R, N] bool; None when every row has N tokens
    gate: Tensor | None = None  # [R, N], what the gate said of each token; None: nothing


class RaggedStore:
    """Keys and values of one layer.

    Args:
        batch: sequences B.
        kv_heads: KV heads Hkv.
        key: any tensor ``[..., D]`` with the keys' size, type and device.
        value: the same for the values.
        gate: type of what a gate says of each token, which is stored beside it; None: there is no gate.
    """

    def __init__(self, batch: int, kv_heads: int, key: Tensor, value: Tensor, gate: torch.dtype | None = None) -> None:
        self.batch, self.kv_heads = batch, kv_heads
        self.keys = key.new_empty(0, key.shape[-1])
        self.values = value.new_empty(0, value.shape[-1])
        self.ranks = torch.empty(0, dtype=torch.int32, device=key.device)
        self.gate = None if gate is None else torch.empty(0, dtype=gate, device=key.device)
        self.layout = Layout(batch * kv_heads, key.device)

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
        """Bytes allocated for keys and values, spare slots included."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def columns(self) -> list[Tensor]:
        """What is stored of each token: key, value, rank, and what the gate said."""
        return [self.keys, self.values, self.ranks, *([] if self.gate is None else [self.gate])]

    def append(self, k: Tensor, v: Tensor, ranks: Tensor, keep: Tensor | None, gate: Tensor | None = None) -> None:
        """Add new tokens at the ends of the rows.

        Args:
            k: keys ``[B, Hkv, T, D]``.
            v: values ``[B, Hkv, T, D]``.
            ranks: ``[B, T]`` rank of each token in its sequence.
            keep: ``[B, Hkv or 1, T]`` bool, which of them to store; None stores all.
            gate: ``[B, Hkv, T]``, what the gate says of them; None: 1 of each.
        """
        shape = k.shape[:3]
        length, spare = shape[2], len(self.keys) > 0
        new = [k.flatten(0, 2), v.flatten(0, 2), ranks[:, None].expand(shape).flatten().int()]
        if self.gate is not None:
            said = self.gate.new_ones(shape) if gate is None else gate.to(self.gate.dtype)
            new.append(said.flatten())
        if keep is None:
            if length > self.layout.room:
                self._lay_out(self.lengths + length, spare=spare)
            slots = self.rows[0] + self.rows[1]
            if length > 1:
                slots = (slots[:, None] + torch.arange(length, device=k.device)).flatten()
        else:
            keep = keep.expand(shape).flatten(0, 1)
            lengths = self.lengths + keep.sum(1).cpu()
            if not self.layout.fits(lengths):
                self._lay_out(lengths, spare=spare)
            chosen = keep.flatten()
            slots = ((self.rows[0] + self.rows[1])[:, None] + keep.cumsum(1) - 1).flatten()[chosen]
            new = [x[chosen] for x in new]
        for column, x in zip(self.columns, new, strict=True):
            column.index_copy_(0, slots, x)
        if keep is None:
            self.layout.grow(length)
        else:
            self.layout.settle(self.layout.starts, lengths)

    def padded(self) -> Rows:
        """Return everything stored.

        Rows of equal length are a view of the storage; others are gathered, so that the memory of one layer is needed
        for a moment.
        """
        longest = self.layout.longest
        step, count = self.layout.step, len(self.lengths)
        if step is not None:
            first, valid = int(self.layout.starts[0]), None
            parts = [
                x.as_strided((count, longest, *x.shape[1:]), (step * x.stride(0), *x.stride()), first * x.stride(0))
                for x in self.columns
            ]
        else:
            index, valid = self.layout.index(longest)
            parts = [x[index] for x in self.columns]
        keys, values, ranks, *gate = parts
        return Rows(keys, values, ranks, valid, *gate)

    def kept(self) -> list[Tensor]:
        """Return the ranks of what each row holds for later queries, ascending."""
        ranks = self.padded().ranks
        return [row[:length] for row, length in zip(ranks, self.lengths.tolist(), strict=True)]

    def counts(self) -> Tensor:
        """Return how many tokens each row holds for later queries, ``[R]`` long on the CPU."""
        return self.lengths

    def count_below(self, ranks: Tensor) -> Tensor:
        """Return how many tokens at the start of each row have a rank below ``ranks[b]`` ``[B]``, ``[R]`` long."""
        index, valid = self.layout.index(self.layout.longest)
        limit = ranks.repeat_interleave(self.kv_heads).to(index.device)
        return (valid & (self.ranks[index] < limit[:, None])).sum(1)

    def retain(self, keep: Tensor, *, spare: bool = True) -> bool:
        """Keep some tokens and free the others.

        Args:
            keep: ``[R, N]`` bool, laid out as :meth:`padded`, True for what stays; free slots are whatever they are.
            spare: whether a new buffer gets spare slots.

        Returns:
            Whether there were others.
        """
        if self.layout.step is None or keep.shape[1] != self.layout.longest:
            # some row is shorter than keep is wide: its free slots, which may be True, are no tokens to be counted
            keep = keep & (torch.arange(keep.shape[1], device=keep.device) < self.rows[1][:, None])
        lengths = keep.sum(1).cpu()
        if sum(lengths.tolist()) == self.layout.total:
            return False
        if self.layout.loose(lengths):
            self._move(self.layout.index(keep.shape[1])[0][keep], lengths, spare=spare)
            return True
        to_end = row_close(self.columns, keep, *self.rows)
        starts = self.layout.starts
        self.layout.settle(starts + (self.lengths - lengths) if to_end else starts, lengths)
        return True

    def select_sequences(self, chosen: Tensor) -> None:
        """Replace the sequences by those at the indices ``chosen`` (beam search, repeated inputs)."""
        heads = torch.arange(self.kv_heads)
        rows = (chosen.cpu()[:, None] * self.kv_heads + heads).flatten()
        index, valid = self.layout.index(self.layout.longest)
        picked = rows.to(index.device)
        self.batch = len(chosen)
        self._move(index[picked][valid[picked]], self.lengths[rows])

    def crop(self, ranks: Tensor) -> None:
        """Drop, at the end of every row, the tokens whose rank is not below ``ranks[b]`` ``[B]``."""
        self.layout.settle(self.layout.starts, self.count_below(ranks).cpu())
        self.trim(spare=True)

    def trim(self, *, spare: bool) -> None:
        """Lay the buffer out anew where it is loose.

        Args:
            spare: whether it has spare slots then; else the next token brings them.
        """
        if self.layout.loose(self.lengths, spare=spare):
            self._lay_out(self.lengths, spare=spare)

    def _lay_out(self, lengths: Tensor, *, spare: bool = True) -> None:
        """Lay the buffer out anew for rows of these lengths."""
        self._move(self.layout.tokens(), self.lengths, lengths, spare=spare)

    def _move(self, slots: Tensor, lengths: Tensor, room: Tensor | None = None, *, spare: bool = True) -> None:
        """Copy the tokens at ``slots`` (row after row, ``lengths`` of them each) into a new buffer.

        Args:
            slots: ``[n]`` long, where the tokens are.
            lengths: ``[R]`` long, tokens of each row.
            room: ``[R]`` long, tokens of each row that there is to be room for; None: those.
            spare: whether there are to be spare slots beside.
        """
        room = lengths if room is None else room
        capacities = torch.tensor([tokens + spare_slots(tokens) for tokens in room.tolist()]) if spare else room
        limits = capacities.cumsum(0)
        starts = limits - capacities
        total, device = int(capacities.sum()), self.keys.device
        shift, held = (sent(x, device) for x in (starts - (lengths.cumsum(0) - lengths), lengths))
        first = torch.repeat_interleave(shift, held, output_size=len(slots))
        source = torch.zeros(total, dtype=torch.long, device=device)  # free slots: of any token
        source[first + torch.arange(len(slots), device=device)] = slots
        moved = [x.index_select(0, source) if len(x) else x.new_zeros(total, *x.shape[1:]) for x in self.columns]
        self.keys, self.values, self.ranks, *gate = moved
        self.gate = gate[0] if gate else None
        self.layout.settle(starts, lengths, limits)
