"""Rows of tokens in the pages of a pool, as kernels take them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Pages(NamedTuple):
    """The columns of a pool of P pages, and R = B Hkv rows that lie in it.

    Row ``b * Hkv + h`` is KV head h of sequence b. Slot t of row r lies in page ``table[r, t // page]``, at place
    ``t % page``; its first ``lengths[r]`` slots hold tokens, in any order.
    """

    keys: Tensor  # [P, page, D]
    values: Tensor  # [P, page, Dv]
    ranks: Tensor  # [P, page] int32, the place of each token among its sequence's own ones
    gate: Tensor | None  # [P, page], what a gate said of each token; None: there is no gate
    table: Tensor  # [R, most] int32; behind a row's last page anything
    lengths: Tensor  # [R] int32

    @property
    def columns(self) -> list[Tensor]:
        """What is stored of each token."""
        return [self.keys, self.values, self.ranks, *([] if self.gate is None else [self.gate])]


def gathered(table: Tensor, lengths: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Return where in a column the slots of rows lie, ``[R, most page]``, and which of them hold a token."""
    slots = torch.arange(table.shape[1] * page, device=table.device)
    there = slots < lengths[:, None]
    return (table.long()[:, slots // page] * page + slots % page).masked_fill(~there, 0), there


class Reach(NamedTuple):
    """What the query of a new token of rank n sees, of which all is held that its query before saw."""

    recent: int | None = None  # the token of rank n - recent goes where its gate is closed; None: gates do not matter
    window: int | None = None  # that of rank n - window goes; not below recent; None: there is no sliding window


class New(NamedTuple):
    """One new token of each row."""

    keys: Tensor  # [B, Hkv, D], of the pool's type, like the next
    values: Tensor  # [B, Hkv, Dv]
    ranks: Tensor  # [B] long; below 0 where a sequence has no new token
    gate: Tensor | None = None  # [B, Hkv], of the type of the pool's column; None: 1 of each, or there is no gate
