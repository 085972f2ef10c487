"""Attention-Gates with a budget: the tokens with the highest gate logits are kept."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import DERIVED, Scorer
from ag.errors import UserError, require
from ag.retention import share_of

RECENT_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Gates(Scorer):
    """The logit of the layer's gate, for a budget. Wrappers weigh by the probability.

    Without a budget the flags decide; see :class:`ag.gates.gating.Gating`. A token on which no gate ran, for example a
    generated token under ``gate.covers=prompt``, has the largest score. A layer without a gate keeps all its tokens,
    and has no part in the budget.

    If the scores of gates decay (``gate.kind=retention``), their output ``b`` is the share of a token's worth that
    remains after each new token. The score is ``(age + 2) log b``, where the newest token has age 0, as in the code of
    TRIM-KV (Bui et al. 2025, ngocbh/trimkv).

    Attributes:
        sinks: first tokens that are kept. None: ``trained_sinks``.
        recent: newest tokens that are kept. None: ``recent_share`` of the budget, but no more than the budget less the
            sinks.
        recent_share: share of the budget. None: ``trained_recent`` tokens, at most a quarter of the budget.
        trained_recent: ``gate.recent_tokens`` less 1, taken from the gates: the newest prompt tokens that the first
            query after the prompt saw in training. The flags keep these too.
        trained_sinks: ``gate.sink_tokens``, taken from the gates.
    """

    sinks: int | None = None  # type: ignore[assignment]
    recent: int | None = None  # type: ignore[assignment]
    recent_share: float | None = None
    trained_recent: int = field(default=0, metadata=DERIVED)
    trained_sinks: int = field(default=0, metadata=DERIVED)
    needs = Needs(gate_logits=True, key_indices=True, steady=True)
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

    def with_trained_protection(self, sinks: int, recent: int) -> Self:
        """Return the scorer that protects these numbers of tokens, unless options give other numbers."""
        return replace(self, trained_sinks=sinks, trained_recent=recent)

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the logit, or the log of a token's remaining worth."""
        if not inputs.log_retention:
            return inputs.gate_logits
        return inputs.gate_logits.clamp_max(0.0) * (inputs.age + 2)  # the log of 1 if no gate ran

    def weight(self, inputs: ScorerInputs, score: Tensor) -> Tensor:
        """Return the probability, or the log of a token's remaining worth."""
        return score if inputs.log_retention else score.sigmoid()

    def limits(self, capacity: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sinks and the newest tokens."""
        sinks = torch.full_like(capacity, self.trained_sinks if self.sinks is None else self.sinks)
        if self.recent is None:
            recent = share_of(capacity, RECENT_SHARE if self.recent_share is None else self.recent_share)
            if self.recent_share is None:
                recent = recent.clamp_max(self.trained_recent)
            recent = recent.minimum((capacity - sinks).clamp_min(0))
        else:
            recent = torch.full_like(capacity, self.recent)
        return sinks, recent
