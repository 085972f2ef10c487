"""Keys that a layer holds, and the queries that meet them, as an observation shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ag.engine.values import Values


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What a layer holds, rows padded to the longest, N slots.

    Attributes:
        stored: gathers keys and values, ``[B, Hkv, N, D]`` or ``[B Hkv, N, D]``, when a scorer reads them;
            those of the queries' own tokens are among them.
        shape: B, Hkv and N.
        ledger: returns :attr:`ranks` and :attr:`valid`, which a step of most scorers does not ask for.
        full: whether the host knows that no slot is free.
        ordered: whether the host knows that the ranks of each row ascend.
        alike: whether the host knows that all heads of a sequence hold the same tokens in the same slots.
    """

    stored: Callable[[], tuple[Any, ...]]
    shape: tuple[int, ...]
    ledger: Callable[[], tuple[Tensor, Tensor]]
    full: bool = False
    ordered: bool = True
    alike: bool = False

    @cached_property
    def _ledger(self) -> tuple[Tensor, Tensor]:
        return self.ledger()

    @property
    def ranks(self) -> Tensor:
        """``[B, Hkv, N]`` int32 or long, the place of each among its sequence's own tokens; any on free slots."""
        return self._ledger[0]

    @property
    def valid(self) -> Tensor:
        """``[B, Hkv, N]`` bool, False on free slots, which come last."""
        return self._ledger[1]

    @cached_property
    def _pair(self) -> list[Tensor]:
        return [x.view(*self.shape[:2], *x.shape[-2:]) for x in self.stored()[:2]]

    @property
    def k(self) -> Tensor:
        """Keys ``[B, Hkv, N, D]``."""
        return self._pair[0]

    @property
    def v(self) -> Tensor:
        """Values ``[B, Hkv, N, D]``."""
        return self._pair[1]

    @cached_property
    def single(self) -> Tensor:
        """Keys in float32."""
        return self.k.float()

    @cached_property
    def double(self) -> Tensor:
        """Keys in float64."""
        return self.k.double()

    @cached_property
    def values(self) -> Values:
        """Values, centred."""
        return Values.of(self.v.float(), self.valid)

    @cached_property
    def sorted_ranks(self) -> Tensor:
        """``[B, Hkv, N]``: free slots rank after everything."""
        return self.ranks.masked_fill(~self.valid, torch.iinfo(self.ranks.dtype).max).contiguous()

    @cached_property
    def order(self) -> Tensor | None:
        """Slots ``[B, Hkv, N]`` in the order of ranks, free ones last; None means that they are in that order."""
        return None if self.ordered else self.sorted_ranks.argsort(-1)


@dataclass(frozen=True, kw_only=True)
class Queries:
    """What meets the keys: the new queries, and before them those that a part of the policy looks back at.

    Attributes:
        q: queries ``[B, H, T, D]``, post-RoPE.
        ranks: ``[B, T]`` long, the place of each among its sequence's own tokens.
        valid: ``[B, T]`` bool, False on padding.
        new: how many of them, at the end, were not shown before; None means all.
        weights: attention weights ``[B, H, N]`` of the new one, 0 where it is padding; None means that there are more,
            or they are not known.
    """

    q: Tensor
    ranks: Tensor
    valid: Tensor
    new: int | None = None
    weights: Tensor | None = None
