"""VATP: attention times the size of the value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ag.engine.scorer_inputs import ScorerInputs
from ag.engine.scorers.base import RowScorer
from ag.engine.wrappers.base import Wrapper


@dataclass(frozen=True, kw_only=True)
class Vatp(Wrapper):
    """``S_p ||v_p||_1``: a token that is attended to but has a small value changes little.

    Source: Guo et al. 2024, "Attention Score is not All You Need for Token Importance Indicator in KV Cache Reduction:
    Value Also Matters", Eq. 3; code guozhiyu/vatp.

    Attributes:
        sinks: first tokens that stay, within the budget (the paper's F).
    """

    inner: RowScorer
    sinks: int = 20
    scores_heads: ClassVar[bool] = False

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the product, which a base that pools pools."""
        return self.inner.pool(inputs, self.inner.reduce(inputs, self.inner.raw(inputs)) * inputs.v.abs().sum(-1))
