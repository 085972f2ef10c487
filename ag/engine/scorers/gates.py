"""Attention-Gates with a budget: the tokens with the highest gate logits stay."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ag.engine.scorer_inputs import ScorerInputs
from ag.engine.scorers.base import DERIVED, Needs, Scorer
from ag.errors import UserError, require

RECENT_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Gates(Scorer):
    """The logit of the probability of the layer's gate, for a budget.

    Without a budget the flags decide; see :class:`ag.gates.gating.Gating`. Wrappers weigh by the probability. A token
    that no gate has judged, such as a generated one under ``gate.covers=prompt``, has the largest score.

    A layer without a gate keeps all its tokens, and has no part in the budget.

    Of gates whose scores decay (``gate.kind=retention``) the output ``b`` is the part of a token's worth that is left
    after each new token. A score is ``(age + 2) log b``, the age of the newest token being 0, as in the code of TRIM-KV
    (Bui et al. 2025, ngocbh/trimkv).

    Attributes:
        sinks: first tokens that stay; None means ``trained_sinks``.
        recent: newest tokens that stay; None means ``recent_share`` of the budget, at most what the sinks leave of it.
        recent_share: of the budget; None means ``trained_recent`` tokens, at most a quarter of the budget.
        trained_recent: tokens of the prompt that the first query behind it saw in training, which is
            ``gate.recent_tokens`` less its own; taken from the gates. The flags keep these too.
        trained_sinks: ``gate.sink_tokens``, taken from the gates.
    """

    sinks: int | None = None  # type: ignore[assignment]
    recent: int | None = None  # type: ignore[assignment]
    recent_share: float | None = None
    trained_recent: int = field(default=0, metadata=DERIVED)
    trained_sinks: int = field(default=0, metadata=DERIVED)
    needs = Needs(steady=True)
    reads_gates: ClassVar[bool] = True
    default_allocator: ClassVar[str] = "global"  # as the flags, which have one boundary for all heads

    def __post_init__(self) -> None:
        require(self, "sinks", self.sinks is None or self.sinks >= 0, "0 or more, or None")
        require(self, "recent", self.recent is None or self.recent >= 0, "0 or more, or None")
        require(self, "recent_share", self.recent_share is None or 0 <= self.recent_share <= 1, "0 to 1, or None")
        if self.recent is not None and self.recent_share is not None:
            raise UserError(
                f"Gates: recent_share={self.recent_share} with recent={self.recent}: expected one of the two, as the "
                "share replaces a number of recents; leave one out."
            )

    def trained_with(self, sinks: int, recent: int) -> Self:
        """Return the scorer that protects these numbers of tokens, where no option gives others."""
        return replace(self, trained_sinks=sinks, trained_recent=recent)

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the logit, or the log of a token's remaining worth."""
        assert inputs.gate is not None
        if not inputs.decays:
            return inputs.gate
        return inputs.gate.clamp_max(0.0) * (inputs.age + 2)  # the log of 1 where no gate ran

    def weight(self, inputs: ScorerInputs, score: Tensor) -> Tensor:
        """Return the probability, or the log of a token's remaining worth."""
        return score if inputs.decays else score.sigmoid()

    def limits(self, capacity: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sinks and the newest tokens."""
        sinks = torch.full_like(capacity, self.trained_sinks if self.sinks is None else self.sinks)
        if self.recent is None:
            recent = (capacity * (RECENT_SHARE if self.recent_share is None else self.recent_share)).long()
            if self.recent_share is None:
                recent = recent.clamp_max(self.trained_recent)
            recent = recent.minimum((capacity - sinks).clamp_min(0))
        else:
            recent = torch.full_like(capacity, self.recent)
        return sinks, recent
