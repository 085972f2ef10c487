"""A wrapper is a scorer that changes the score of another scorer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from ag.engine.observe import Observation
from ag.engine.repeat import Repetition
from ag.engine.scorers.base import Scorer


@dataclass(frozen=True, kw_only=True)
class Wrapper(Scorer):
    """Changes the score of ``inner``; what ``inner`` protects stays protected.

    Attributes:
        inner: the scorer it acts on.
    """

    inner: Scorer

    #: Whether it replaces or multiplies sums of attention rows, and so needs an inner scorer that has them.
    needs_rows: ClassVar[bool] = False
    #: Whether it scores each head by itself, so that the inner scorer must too.
    scores_heads: ClassVar[bool] = True

    @property
    def reads_gates(self) -> bool:  # type: ignore[override]
        """Whether the inner scorer scores by gates."""
        return self.inner.reads_gates

    @property
    def turns(self) -> bool:  # type: ignore[override]
        """Whether the inner scorer turns queries."""
        return self.inner.turns

    @property
    def projects(self) -> bool:  # type: ignore[override]
        """Whether the inner scorer asks for the output projection."""
        return self.inner.projects

    @property
    def follows(self) -> bool:  # type: ignore[override]
        """Whether the inner scorer has to see every query."""
        return self.inner.follows

    @property
    def lookback(self) -> int:
        """Earlier queries that the inner scorer needs."""
        return self.inner.lookback

    @property
    def observers(self) -> int | None:
        """Queries of the inner scorer's observation window."""
        return self.inner.observers

    @property
    def rereads(self) -> bool:  # type: ignore[override]
        """Whether the inner scorer reads a prompt twice."""
        return self.inner.rereads

    def repetition(self) -> Repetition | None:
        """Return what lets the model read a prompt again for the inner scorer."""
        return self.inner.repetition()

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """Return the same on an inner scorer that has what it needs of a tokenizer."""
        return replace(self, inner=self.inner.with_tokenizer(tokenizer))

    def trained_with(self, sinks: int, recent: int) -> Self:
        """Return the same on an inner scorer that protects what the training of its gates did."""
        return replace(self, inner=self.inner.trained_with(sinks, recent))

    def protected(self, seen: Observation, capacity: Tensor) -> Tensor:
        """Return what the inner scorer protects, and what this one does."""
        return self.inner.protected(seen, capacity) | super().protected(seen, capacity)
