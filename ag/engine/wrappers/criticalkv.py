"""CriticalKV: half of the budget by the base score, half by that times the size of the projected value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ag.engine.records import Records
from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import grouped
from ag.engine.wrappers.base import Wrapper
from ag.errors import require
from ag.model.projection import projected_norms

SMALL = 1e-4  # added to the base score, as published


@dataclass(frozen=True, kw_only=True)
class CriticalKV(Wrapper):
    """Each head keeps the best tokens by ``S``, then fills its budget by ``(S_p + 1e-4) mean_g ||W_O v_p||_1``.

    The base score ``S`` alone decides how many tokens each head gets. If it is below 0 in a head, the score in the
    product is shifted up until its smallest value is 0. Under gates the product takes the probability.

    Source: Feng et al. 2025, "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective",
    after NVIDIA/kvpress; there tokens that the base protects count as its best too.

    Attributes:
        first: share of each head's budget that the base score fills.
    """

    first: float = 0.5
    scores_heads: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "first", 0 <= self.first <= 1, "a share from 0 to 1")

    def add_needs(self, needs: Needs) -> Needs:
        """Return the base's needs, the values and the output projection, in each pass that the base notes."""
        noted = ("values", "key_valid", "output_projection")
        every_query = (*needs.every_query, *noted) if needs.every_query else ()
        needs = super().add_needs(needs)
        return replace(needs, values=True, key_valid=True, output_projection=True, every_query=every_query)

    def note(self, inputs: ScorerInputs, records: Records) -> None:
        """Record ``mean_g ||W_O v||_1`` too, ``[B, Hkv, N]``, computed once for each token."""
        super().note(inputs, records)
        sizes_so_far = records.get("size", torch.zeros_like(inputs.values[..., 0]))  # newer tokens have 0
        missing = inputs.key_valid & (sizes_so_far == 0)
        width = int(missing.sum(-1).max())
        if width:
            order = missing.long().argsort(dim=-1, descending=True, stable=True)[..., :width]
            values = inputs.values.gather(2, order[..., None].expand(-1, -1, -1, inputs.values.shape[-1]))
            sizes = grouped(projected_norms(values, inputs.output_projection, 1), inputs, "mean")
            sizes_so_far = sizes_so_far.scatter(-1, order, sizes)
        records["size"] = sizes_so_far

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the base score; heads and layers compete by it."""
        return self.inner.score(inputs)

    def second(self, inputs: ScorerInputs, score: Tensor) -> tuple[Tensor, float]:
        """Return the product, which compares tokens of one head, and the share that the first score fills."""
        weight = self.inner.weight(inputs, score)
        lowest = weight.masked_fill(~inputs.key_valid, float("inf")).amin(-1, keepdim=True)
        return (weight - lowest.clamp_max(0.0) + SMALL) * inputs.records["size"], self.first
