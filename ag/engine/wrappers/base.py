"""A wrapper is a scorer that turns another one's score into a better one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ag.engine.observe import Observation
from ag.engine.scorers.base import Scorer


@dataclass(frozen=True, kw_only=True)
class Wrapper(Scorer):
    """Acts on the score of ``inner``, and protects what it protects.

    Attributes:
        inner: the scorer it acts on.
    """

    inner: Scorer

    @property
    def follows(self) -> bool:  # type: ignore[override]
        """Whether the inner scorer has to see every query."""
        return self.inner.follows

    @property
    def lookback(self) -> int:
        """Earlier queries that the inner scorer needs."""
        return self.inner.lookback

    def protected(self, seen: Observation, capacity: Tensor) -> Tensor:
        """Return what the inner scorer protects, and what this one does."""
        return self.inner.protected(seen, capacity) | super().protected(seen, capacity)
