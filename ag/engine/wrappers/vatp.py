"""VATP: attention times the size of the value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import RowScorer
from ag.engine.wrappers.base import Wrapper


@dataclass(frozen=True, kw_only=True)
class Vatp(Wrapper):
    """``S_p ||v_p||_1``: a token that is attended to but has a small value changes little.

    Source: Guo et al. 2024, "Attention Score is not All You Need for Token Importance Indicator in KV Cache Reduction:
    Value Also Matters", Eq. 3; code guozhiyu/vatp.

    Attributes:
        sinks: first tokens that are kept, within the budget (the paper's F).
    """

    inner: RowScorer
    sinks: int = 20
    scores_heads: ClassVar[bool] = False

    def add_needs(self, needs: Needs) -> Needs:
        """Return the base's needs and the values."""
        return replace(super().add_needs(needs), values=True)

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the product, pooled if the base pools."""
        attention = self.inner.reduce(inputs, self.inner.sums(inputs))
        return self.inner.pool(inputs, attention * inputs.values.abs().sum(-1))
