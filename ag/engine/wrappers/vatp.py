"""VATP: attention times the size of the value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ag.engine.attention_stats import AttentionStats
from ag.engine.scorers.base import RowScorer
from ag.engine.wrappers.base import Wrapper


@dataclass(frozen=True, kw_only=True)
class Vatp(Wrapper):
    """``S_p ||v_p||``: a token that is attended to but has a small value changes little.

    Source: Guo et al. 2024, "Attention Score is not All You Need for Token Importance Indicator in KV Cache Reduction:
    Value Also Matters", Eq. 3; code guozhiyu/vatp.

    Attributes:
        norm: of the value: 1, 2 or ``inf``.
        sinks: first tokens that stay, within the budget (the paper's F).
        stage: whether the norm multiplies ``before`` or ``after`` a pooling base pools.
    """

    inner: RowScorer
    norm: Literal[1, 2, "inf"] = 1
    sinks: int = 20
    stage: Literal["before", "after"] = "before"
    scores_heads: ClassVar[bool] = False

    def score(self, seen: AttentionStats) -> Tensor:
        """Return the product."""
        norms: Tensor = torch.linalg.vector_norm(seen.v, ord=float(self.norm), dim=-1)
        if self.stage == "after":
            return self.inner.score(seen) * norms
        return self.inner.pool(seen, self.inner.reduce(seen, self.inner.raw(seen)) * norms)
