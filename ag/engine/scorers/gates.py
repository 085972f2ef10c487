"""Attention-Gates with a budget: the tokens with the highest gate probability stay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from ag.engine.observe import Observation
from ag.engine.scorers.base import Scorer
from ag.errors import require


@dataclass(frozen=True, kw_only=True)
class Gates(Scorer):
    """The probability of the layer's gate, for a budget.

    Without a budget the flags decide; see :class:`ag.gates.gating.Gating`.

    In a layer without a gate all scores are equal, so that the first tokens stay.

    Attributes:
        sinks: first tokens that stay; None: as many as every query saw in training, ``gate.sink_tokens``.
        recent: newest tokens that stay; None: as many of the prompt as the first query behind it saw in training,
            ``gate.recent_tokens`` less its own. The flags keep these too.
    """

    sinks: int | None = None  # type: ignore[assignment]
    recent: int | None = None  # type: ignore[assignment]
    reads_gates: ClassVar[bool] = True
    default_allocator: ClassVar[str] = "global"  # as the flags, which have one boundary for all heads

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        require(self, "sinks", self.sinks is None or self.sinks >= 0, "0 or more, or None")
        require(self, "recent", self.recent is None or self.recent >= 0, "0 or more, or None")

    def trained_with(self, sinks: int, recent: int) -> Self:
        """Return the scorer that protects so many tokens, where it was not told how many."""
        return replace(
            self,
            sinks=sinks if self.sinks is None else self.sinks,
            recent=recent if self.recent is None else self.recent,
        )

    def score(self, seen: Observation) -> Tensor:
        """Return the probability, 1 without a gate."""
        return seen.gate if seen.gate is not None else seen.key_ranks.new_ones(seen.key_ranks.shape).float()

    def protected(self, seen: Observation, capacity: Tensor) -> Tensor:
        """Return the sinks and the newest tokens."""
        return (seen.key_ranks < (self.sinks or 0)) | (seen.age < (self.recent or 0))
