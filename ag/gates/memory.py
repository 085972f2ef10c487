"""Keys and values of an attention gate for a growing text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.stateful import Attributes

QUERY_BLOCK = 256  # queries that meet the remembered tokens at once


def has_gaps(valid: Tensor) -> bool:
    """Whether some row of ``[B, T]`` bool, False on padding, has padding between tokens."""
    return bool((~valid[:, :-1] & valid[:, 1:] & (valid.cumsum(1) > 0)[:, :-1]).any())


@dataclass
class GateMemory(Attributes):
    """Keys and values of the earlier tokens for the gate of one layer.

    The token of rank r lies in slot ``r % window``, so that the newest ``window`` tokens of each sequence are there and
    none has to move. Tokens of the last pass stay apart until the next pass calls :meth:`settle`, so that :meth:`crop`
    can remove them; a pass of one token settles at once, because no later token needs the one that it replaces.

    Args:
        window: newest tokens that a token's gate sees, its own included; 0 means all.
    """

    STATE: ClassVar[Mapping[str, Any]] = {"stored": tuple | None, "new": tuple | None, "_seen": int, "_even": bool}

    window: int
    #: Keys and values ``[B, N, 2 h' d']``, and the rank ``[B, N]`` of each slot's token, -1 where there is none.
    stored: tuple[Tensor, Tensor] | None = None
    #: The same for the last pass.
    new: tuple[Tensor, Tensor] | None = None
    _seen: int = 0  # tokens of the longest sequence at most
    _even: bool = True  # whether each sequence has this number, as none was padded

    def reset(self) -> None:
        """Forget everything."""
        self.stored, self.new, self._seen, self._even = None, None, 0, True

    def __bool__(self) -> bool:
        return self.stored is not None or self.new is not None

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(part[0].nbytes for part in (self.stored, self.new) if part is not None)

    def add(self, k: Tensor, v: Tensor, ranks: Tensor, real: Tensor | None) -> None:
        """Add keys and values ``[B, T, h' d']`` of a pass; ``ranks`` and ``real`` are those of a gate's ``step``."""
        self.settle()
        self._seen += ranks.shape[1]
        self._even = self._even and real is None
        self.new = torch.cat([k, v], -1), ranks if real is None else ranks.masked_fill(~real, -1)
        if ranks.shape[1] == 1:
            self.settle()

    def attend(self, q: Tensor, ranks: Tensor) -> Tensor:
        """Attend from the newest tokens, ``[B, h', T, d']``, to those that they may see; returns the same shape."""
        parts = [part for part in (self.stored, self.new) if part is not None]
        both = torch.cat([part[0] for part in parts], 1) if len(parts) > 1 else parts[0][0]
        held = torch.cat([part[1] for part in parts], 1) if len(parts) > 1 else parts[0][1]
        if self.new is None and self._even:  # one query, which sees all stored tokens
            both = both[:, : self._seen]
        k, v = both.view(*both.shape[:2], 2, q.shape[1], -1).permute(2, 0, 3, 1, 4)
        if self.new is None:
            return F.scaled_dot_product_attention(q, k, v, None if self._even else (held >= 0)[:, None, None])
        outs = []
        for block, rank in zip(q.split(QUERY_BLOCK, 2), ranks.split(QUERY_BLOCK, 1), strict=True):
            distance = rank[:, :, None] - held[:, None]
            near = (held >= 0)[:, None] & (distance >= 0)
            if self.window:
                near = near & (distance < self.window)
            outs.append(F.scaled_dot_product_attention(block, k, v, near[:, None]))
        return torch.cat(outs, 2)

    def settle(self) -> None:
        """Move the tokens of the last pass to their slots."""
        if self.new is None:
            return
        (both, ranks), self.new = self.new, None
        stored, held = self._room(both)
        size = held.shape[1]
        if ranks.shape[1] == 1:  # the host does not wait
            rows, slots = torch.arange(len(ranks), device=ranks.device), (ranks % size)[:, 0]
            real = ranks >= 0
            stored[rows, slots] = torch.where(real, both[:, 0], stored[rows, slots])
            held[rows, slots] = torch.where(real[:, 0], ranks[:, 0], held[rows, slots])
            return
        wanted = (ranks >= 0) & (ranks > ranks.amax(1, keepdim=True) - size)
        rows, columns = wanted.nonzero(as_tuple=True)
        slots = ranks[rows, columns] % size
        stored[rows, slots], held[rows, slots] = both[rows, columns], ranks[rows, columns]

    def step_key(self) -> tuple[object, ...] | None:
        """Return the place of the next token of each sequence; None where the memory grows or more of it is read."""
        if not self:
            return ()
        if self.stored is None or self.new is not None or not self.window or self._seen < self.window:
            return None
        return self._even, *(x.data_ptr() for x in self.stored)

    def stepped(self) -> None:
        """Count a token of each sequence in a replayed step."""
        self._seen += bool(self)

    def crop(self, counts: Tensor) -> None:
        """Remove the tokens whose rank is not below ``counts[b]`` ``[B]``."""
        if not self:
            return
        for part in (self.stored, self.new):
            if part is not None:
                part[1].masked_fill_(part[1] >= counts.to(part[1].device)[:, None], -1)
        self._seen, self._even = int(counts.max()), self._even and bool((counts == counts[0]).all())

    def join(self, other: GateMemory) -> None:
        """Append the sequences of another memory of the same gate."""
        self.settle()
        other.settle()
        self._even = self._even and other._even and self._seen == other._seen
        self._seen = max(self._seen, other._seen)
        if self.stored is None or other.stored is None:
            return
        parts = self.stored, other.stored
        size = max(ranks.shape[1] for _, ranks in parts)  # below the window a token's slot is its rank
        both = torch.cat([F.pad(x, (0, 0, 0, size - x.shape[1])) for x, _ in parts])
        self.stored = both, torch.cat([F.pad(ranks, (0, size - ranks.shape[1]), value=-1) for _, ranks in parts])

    def select(self, indices: Tensor) -> None:
        """Select the sequences at ``indices``."""

        def picked(part: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
            return None if part is None else (part[0][indices.to(part[0].device)], part[1][indices.to(part[1].device)])

        self.stored, self.new = picked(self.stored), picked(self.new)

    def _room(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stored part, with slots for all tokens so far."""
        needed = min(self._seen, self.window or self._seen)
        if self.stored is not None and self.stored[1].shape[1] >= needed:
            return self.stored
        size = needed + max(16, needed // 16)
        size = min(size, self.window or size)
        grown = like.new_zeros(like.shape[0], size, like.shape[2])
        ranks = torch.full((like.shape[0], size), -1, device=like.device)
        if self.stored is not None:  # below the window a slot is a rank, so that tokens keep theirs
            before = self.stored[1].shape[1]
            grown[:, :before], ranks[:, :before] = self.stored
        self.stored = grown, ranks
        return self.stored
