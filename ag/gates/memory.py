"""Keys and values of an attention gate for a growing text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.stateful import Attributes

QUERY_BLOCK = 256  # queries that attend at once


def has_gaps(valid: Tensor) -> bool:
    """Whether a row has padding between tokens; ``valid`` is ``[B, T]`` bool, False on padding."""
    return bool((~valid[:, :-1] & valid[:, 1:] & (valid.cumsum(1) > 0)[:, :-1]).any())


@dataclass
class GateMemory(Attributes):
    """Keys and values of the earlier tokens for the gate of one layer.

    Token i lies in slot ``i % window``: the memory has the newest ``window`` tokens of each sequence, and no token
    moves. Tokens of the last pass are stored separately until the next pass calls :meth:`settle`, because :meth:`crop`
    may remove them. A pass of one token is settled at once: no later token needs the token that it replaces.

    Args:
        window: newest tokens that a token's gate reads, its own included; 0 means all.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "stored": tuple | None,
        "new": tuple | None,
        "_max_tokens": int,
        "_even": bool,
    }

    window: int
    #: Keys and values ``[B, N, 2 h' d']``, and the token index ``[B, N]`` of each slot; -1: the slot is empty.
    stored: tuple[Tensor, Tensor] | None = None
    #: Keys, values and token indices of the last pass.
    new: tuple[Tensor, Tensor] | None = None
    _max_tokens: int = 0  # upper bound of the tokens of the longest sequence
    _even: bool = True  # whether all have exactly so many, because no pass was padded: no slot is empty

    def reset(self) -> None:
        """Forget everything."""
        self.stored, self.new, self._max_tokens, self._even = None, None, 0, True

    def __bool__(self) -> bool:
        return self.stored is not None or self.new is not None

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(part[0].nbytes for part in (self.stored, self.new) if part is not None)

    def add(self, k: Tensor, v: Tensor, token_indices: Tensor, valid: Tensor | None) -> None:
        """Add keys and values ``[B, T, h' d']`` of a pass; the other arguments are as in ``AttentionGate.step``."""
        self.settle()
        self._max_tokens += token_indices.shape[1]
        self._even = self._even and valid is None
        self.new = torch.cat([k, v], -1), token_indices if valid is None else token_indices.masked_fill(~valid, -1)
        if token_indices.shape[1] == 1:
            self.settle()

    def attend(self, q: Tensor, token_indices: Tensor) -> Tensor:
        """Return the attention outputs of the newest tokens, shaped like their queries ``q`` ``[B, h', T, d']``."""
        parts = [part for part in (self.stored, self.new) if part is not None]
        kv = torch.cat([part[0] for part in parts], 1) if len(parts) > 1 else parts[0][0]
        key_indices = torch.cat([part[1] for part in parts], 1) if len(parts) > 1 else parts[0][1]
        if self.new is None and self._even:  # one query, and it sees all stored tokens
            kv = kv[:, : self._max_tokens]
        k, v = kv.view(*kv.shape[:2], 2, q.shape[1], -1).permute(2, 0, 3, 1, 4)
        if self.new is None:
            return F.scaled_dot_product_attention(q, k, v, None if self._even else (key_indices >= 0)[:, None, None])
        outputs = []
        for block, query_indices in zip(q.split(QUERY_BLOCK, 2), token_indices.split(QUERY_BLOCK, 1), strict=True):
            distance = query_indices[:, :, None] - key_indices[:, None]
            visible = (key_indices >= 0)[:, None] & (distance >= 0)
            if self.window:
                visible = visible & (distance < self.window)
            outputs.append(F.scaled_dot_product_attention(block, k, v, visible[:, None]))
        return torch.cat(outputs, 2)

    def settle(self) -> None:
        """Move the tokens of the last pass to their slots."""
        if self.new is None:
            return
        (kv, token_indices), self.new = self.new, None
        stored_kv, stored_indices = self._grow(kv)
        size = stored_indices.shape[1]
        if token_indices.shape[1] == 1:  # the host does not wait
            rows, slots = torch.arange(len(token_indices), device=token_indices.device), (token_indices % size)[:, 0]
            valid = token_indices >= 0
            stored_kv[rows, slots] = torch.where(valid, kv[:, 0], stored_kv[rows, slots])
            stored_indices[rows, slots] = torch.where(valid[:, 0], token_indices[:, 0], stored_indices[rows, slots])
            return
        newest = (token_indices >= 0) & (token_indices > token_indices.amax(1, keepdim=True) - size)
        rows, columns = newest.nonzero(as_tuple=True)
        slots = token_indices[rows, columns] % size
        stored_kv[rows, slots], stored_indices[rows, slots] = kv[rows, columns], token_indices[rows, columns]

    def step_key(self) -> tuple[object, ...] | None:
        """Return a key of the tensors that the next step reads. None: the step allocates, or reads a longer memory."""
        if not self:
            return ()
        if self.stored is None or self.new is not None or not self.window or self._max_tokens < self.window:
            return None
        return self._even, *(x.data_ptr() for x in self.stored)

    def stepped(self) -> None:
        """Count one token of each sequence, for a replayed step."""
        self._max_tokens += bool(self)

    def crop(self, counts: Tensor) -> None:
        """Keep the first ``counts[b]`` tokens of each sequence; ``counts`` ``[B]``."""
        if not self:
            return
        if not bool(counts.any()):  # the next text may have another batch size
            self.reset()
            return
        for part in (self.stored, self.new):
            if part is not None:
                part[1].masked_fill_(part[1] >= counts.to(part[1].device)[:, None], -1)
        self._max_tokens, self._even = int(counts.max()), self._even and bool((counts == counts[0]).all())

    def join(self, other: GateMemory) -> None:
        """Append the sequences of another memory of this gate."""
        self.settle()
        other.settle()
        self._even = self._even and other._even and self._max_tokens == other._max_tokens
        self._max_tokens = max(self._max_tokens, other._max_tokens)
        if self.stored is None or other.stored is None:
            return
        parts = self.stored, other.stored
        size = max(indices.shape[1] for _, indices in parts)  # if the window is not full, a token's slot is its index
        kv = torch.cat([F.pad(x, (0, 0, 0, size - x.shape[1])) for x, _ in parts])
        self.stored = kv, torch.cat([F.pad(indices, (0, size - indices.shape[1]), value=-1) for _, indices in parts])

    def select(self, indices: Tensor) -> None:
        """Select the sequences at ``indices``."""

        def picked(part: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
            return None if part is None else (part[0][indices.to(part[0].device)], part[1][indices.to(part[1].device)])

        self.stored, self.new = picked(self.stored), picked(self.new)

    def _grow(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``stored``, after adding slots for all tokens so far."""
        needed = min(self._max_tokens, self.window or self._max_tokens)
        if self.stored is not None and self.stored[1].shape[1] >= needed:
            return self.stored
        size = needed + max(16, needed // 16)
        size = min(size, self.window or size)
        kv = like.new_zeros(like.shape[0], size, like.shape[2])
        indices = torch.full((like.shape[0], size), -1, device=like.device)
        if self.stored is not None:  # the window is not full: a slot is a token index, and tokens keep their slots
            old_size = self.stored[1].shape[1]
            kv[:, :old_size], indices[:, :old_size] = self.stored
        self.stored = kv, indices
        return self.stored
