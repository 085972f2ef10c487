"""The keys and values that a layer holds, as scorers see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ag.engine.rows import Values


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys and values that a layer holds, rows padded to the longest, N slots.

    Attributes:
        stored: gathers keys and values, ``[B, Hkv, N, D]`` or ``[B Hkv, N, D]``, when a scorer reads them;
            those of the queries' own tokens are among them.
        shape: B, Hkv and N.
        ledger: returns :attr:`token_indices` and :attr:`valid`, which a step of most scorers does not need.
        ordered: whether the host knows that the token of token index n lies in slot n.
        alike: whether the host knows that all heads of a sequence hold the same tokens in the same slots.
    """

    stored: Callable[[], tuple[Any, ...]]
    shape: tuple[int, ...]
    ledger: Callable[[], tuple[Tensor, Tensor]]
    ordered: bool = False
    alike: bool = False

    @cached_property
    def _ledger(self) -> tuple[Tensor, Tensor]:
        return self.ledger()

    @property
    def token_indices(self) -> Tensor:
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
    def values(self) -> Values:
        """Values, centred."""
        return Values.of(self.v.float(), self.valid)

    @cached_property
    def order(self) -> Tensor | None:
        """Slots ``[B, Hkv, N]`` by ascending token index, free slots last; None: they are in this order already."""
        return None if self.ordered else in_order(self.token_indices.masked_fill(~self.valid, -1))


def in_order(token_indices: Tensor) -> Tensor:
    """Return slots ``[B, Hkv, N]`` long by ascending token index; free slots, whose index is -1, come last."""
    slots: Tensor = token_indices.masked_fill(token_indices < 0, torch.iinfo(token_indices.dtype).max).argsort(-1)
    return slots
