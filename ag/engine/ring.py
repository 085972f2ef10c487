"""Storage of a gated layer: the newest tokens in a ring, before them in the text what the gate's flags left.

A row lies as ``[ring | survivors | tokens of the last pass]``. The token of rank r lies in slot ``r % ring`` of its
row. When a later one takes that slot the token joins the survivors if it is flagged, else it is gone; no other token
moves. So one token is stored by :func:`ag.kernels.ring_append.ring_append` in place. Several at once are appended in
order, and put where they belong when the next pass comes (:meth:`RingStore.settle`). Either way all that the last pass
saw is still there, so that :meth:`RingStore.crop` can take the pass back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ag.engine.storage import RaggedStore, Rows
from ag.kernels.ring_append import ring_append


class RingStore(RaggedStore):
    """Keys and values of one layer, with the flag of each token in ``gate``.

    Args:
        batch: sequences B.
        kv_heads: KV heads Hkv.
        key: any tensor ``[..., D]`` with the keys' size, type and device.
        value: the same for the values.
        recent: newest tokens that a query sees whatever their flags, its own included.
        window: sliding window of the model's layer: no query sees a token at this distance or beyond; None: none.
    """

    def __init__(
        self, batch: int, kv_heads: int, key: Tensor, value: Tensor, *, recent: int, window: int | None
    ) -> None:
        super().__init__(batch, kv_heads, key, value, torch.bool)
        self.recent = recent if window is None else min(recent, window)
        self.window = window
        #: Lengths of the rows without the tokens that are still to be settled, ``[R]``; None: there are none.
        self.before: Tensor | None = None
        #: Whether nothing is held that the next query cannot see.
        self.settled = True
        self._flagged = 0  # newest tokens of each row that the host knows to be flagged
        #: Whether every query sees all that is held, as in a prompt that is read densely.
        self.open = False

    @property
    def flags(self) -> Tensor:
        """``[S]`` bool, the flag of each slot's token."""
        assert self.gate is not None
        return self.gate

    def append(self, k: Tensor, v: Tensor, ranks: Tensor, keep: Tensor | None, gate: Tensor | None = None) -> None:
        """Add the tokens of a pass at the ends of the rows; the arguments are those of the base."""
        if self.before is None:
            self.before = self.lengths.clone()
        self.settled, self._flagged = False, 0
        super().append(k, v, ranks, keep, gate)

    def push(self, k: Tensor, v: Tensor, ranks: Tensor, flags: Tensor | None) -> None:
        """Store one new token of each sequence in the ring; what nobody sees any longer goes.

        Args:
            k: keys ``[B, Hkv, 1, D]``.
            v: values ``[B, Hkv, 1, D]``.
            ranks: ``[B, 1]`` long; below 0 where a sequence has no new token.
            flags: ``[B, Hkv, 1]`` bool; None: every sequence has a new token, and it is flagged.
        """
        grows = flags is None and self._flagged >= self.recent  # what leaves the ring is flagged too
        self._flagged = 0 if flags is not None else self._flagged + 1
        flags = torch.ones(k.shape[:3], dtype=torch.bool, device=k.device) if flags is None else flags
        if self.layout.room < 1 and self.layout.count_room() < 1:
            self._lay_out(self.lengths + 1)
        starts, lengths = self.rows
        ring_append(
            keys=self.keys,
            values=self.values,
            ranks=self.ranks,
            flags=self.flags,
            starts=starts,
            lengths=lengths,
            new_keys=k[:, :, 0],
            new_values=v[:, :, 0],
            new_flags=flags[:, :, 0],
            new_ranks=ranks[:, 0],
            ring=self.recent,
            window=self.window,
        )
        self.layout.push(grows)
        self.settled = False
        if self._flagged == self.recent:
            self.layout.count_room()  # the host waits for the lengths, and knows them from now on

    def settle(self, *, spare: bool = True) -> None:
        """Put the tokens of the last pass where they belong, and free what no query after it sees.

        Args:
            spare: whether a new buffer gets spare slots.
        """
        if not self.settled:
            self._arrange(None, spare=spare)

    def crop(self, ranks: Tensor) -> None:
        """Drop the tokens whose rank is not below ``ranks[b]`` ``[B]``."""
        lengths = self.count_below(ranks).cpu()
        if self.before is not None and bool((lengths >= self.before).all()):
            super().crop(ranks)
        else:
            self._arrange(ranks)

    def select_sequences(self, chosen: Tensor) -> None:
        """Replace the sequences by those at the indices ``chosen``."""
        if self.before is not None:
            self.before = self.before.view(self.batch, -1)[chosen.cpu()].flatten()
        super().select_sequences(chosen)

    def kept(self) -> list[Tensor]:
        """Return the ranks of what each row holds, ascending."""
        rows = self.ordered()
        return [ranks[there] for ranks, there in zip(rows.ranks, self._there(rows), strict=True)]

    def counts(self) -> Tensor:
        """Return how many tokens each row holds, ``[R]`` long on the CPU."""
        return self._there(self.padded()).sum(1).cpu()

    def ordered(self) -> Rows:
        """Return everything stored in the order of ranks, rows padded."""
        rows = self.padded()
        assert rows.gate is not None
        there = self._there(rows)
        order = rows.ranks.masked_fill(~there, torch.iinfo(torch.int32).max).argsort(1)
        keys, values = (x.gather(1, order[:, :, None].expand(-1, -1, x.shape[2])) for x in (rows.keys, rows.values))
        ranks, there, gate = (x.gather(1, order) for x in (rows.ranks, there, rows.gate))
        return Rows(keys, values, ranks, there, gate)

    def _there(self, rows: Rows) -> Tensor:
        """Return ``[R, N]`` bool: which slots hold a token; a free one within a row has the rank -1."""
        there = rows.ranks >= 0
        return there if rows.valid is None else there & rows.valid

    def _arrange(self, counts: Tensor | None, *, spare: bool = True) -> None:
        """Lay rows out as ring and survivors.

        Args:
            counts: ``[B]``, own tokens of each sequence, beyond which all go; None: as many as there are.
            spare: whether the new buffer gets spare slots.
        """
        self.before, self.settled, self.open, self._flagged = None, True, False, 0
        longest = self.layout.longest
        if not longest:
            return
        index, valid = self.layout.index(longest)
        ranks = self.ranks[index].masked_fill(~valid, -1)
        end = ranks.amax(1, keepdim=True) + 1
        if counts is not None:
            end = counts.to(ranks.device).repeat_interleave(self.kv_heads)[:, None]
            ranks = ranks.masked_fill(ranks >= end, -1)
        stays = (ranks >= 0) & (self.flags[index] | (ranks > end - self.recent))
        if self.window is not None:
            stays = stays & (ranks > end - self.window)
        in_ring, ring = ranks >= end - self.recent, end.clamp_max(self.recent)
        lengths = ring[:, 0] + (stays & ~in_ring).sum(1)
        width = int(lengths.max())
        place = torch.where(in_ring, ranks % self.recent, ring + (stays & ~in_ring).cumsum(1) - 1)
        place = place.where(stays, width).long()
        source = torch.full((len(index), width + 1), -1, device=index.device).scatter_(1, place, index)[:, :width]
        held = torch.arange(width, device=index.device) < lengths[:, None]
        self._move(source.clamp_min(0)[held], lengths.long().cpu(), spare=spare)
        slots = self.layout.index(width)[0][held & (source < 0)]  # where the next token comes, unless a flagged one is
        self.ranks[slots], self.flags[slots] = -1, False
