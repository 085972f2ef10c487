"""TOVA: what the newest query attends to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ag.engine.rows import Statistic, attention
from ag.engine.scorer_inputs import ScorerInputs
from ag.engine.scorers.base import Needs, RowScorer


@dataclass(frozen=True, kw_only=True)
class Tova(RowScorer):
    """Attention of the newest query.

    Source: Oren et al. 2024, "Transformers are Multi-State RNNs"; code schwartz-lab-NLP/TOVA. Deviation: the newest
    token stays (``recent=0`` for the official behaviour).

    Attributes:
        scope: ``layer``: the mean over all query heads, so that all KV heads keep the same; ``kv_head``: the mean
            over the group.
        recent: newest tokens that stay.
    """

    scope: Literal["layer", "kv_head"] = "layer"
    recent: int = 1
    needs = Needs(rows=True, steady=True)

    @property
    def alike(self) -> bool:
        """Whether all KV heads have one score: that of the layer."""
        return self.scope == "layer"

    @classmethod
    def wrapped(cls, by_head: bool) -> Mapping[str, tuple[Any, str]]:
        """Return that each head has its own score, where the wrapper needs that."""
        return {"scope": ("kv_head", "{wrapper} scores each head")} if by_head else {}

    def sums(self, inputs: ScorerInputs, statistic: Statistic = attention) -> Tensor:
        """Return the statistic of the newest query."""
        return inputs.newest(statistic)

    def reduce(self, inputs: ScorerInputs, heads: Tensor) -> Tensor:
        """Average over the heads of the scope; a head that no longer holds a token contributes 0."""
        return super().reduce(inputs, heads) if self.scope == "kv_head" else inputs.over_layer(heads)
