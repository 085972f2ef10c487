"""TOVA: the attention of the newest query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import RowScorer


@dataclass(frozen=True, kw_only=True)
class Tova(RowScorer):
    """Attention of the newest query.

    Source: Oren et al. 2024, "Transformers are Multi-State RNNs"; code schwartz-lab-NLP/TOVA. Deviation: the newest
    token is kept (``recent=0`` for the official behaviour).

    Attributes:
        scope: ``layer``: the mean over all query heads of the layer, and all KV heads keep equal tokens;
            ``kv_head``: the mean over the query heads of each KV head.
        recent: newest tokens that are kept.
    """

    scope: Literal["layer", "kv_head"] = "layer"
    recent: int = 1
    needs = Needs(attention_sums=1, steady=True)

    @property
    def same_for_all_heads(self) -> bool:
        """Whether all KV heads share the score of the layer."""
        return self.scope == "layer"

    @classmethod
    def wrapped(cls, by_head: bool) -> Mapping[str, tuple[Any, str]]:
        """Return that each head has its own score, if the wrapper needs that."""
        return {"scope": ("kv_head", "{wrapper} scores each head")} if by_head else {}

    def reduce(self, inputs: ScorerInputs, heads: Tensor) -> Tensor:
        """Average over the heads of the scope; a head that no longer holds a token contributes 0."""
        return super().reduce(inputs, heads) if self.scope == "kv_head" else inputs.mean_over_layer(heads)
