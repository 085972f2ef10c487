"""CriticalKV: half of the budget by the base score, half by that times the size of the projected value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ag.engine.records import Records
from ag.engine.scorer_inputs import ScorerInputs
from ag.engine.scorers.base import Needs, grouped
from ag.engine.wrappers.base import Wrapper
from ag.errors import require
from ag.model.projection import projected_norms

SMALL = 1e-4  # added to the base score, as published


@dataclass(frozen=True, kw_only=True)
class CriticalKV(Wrapper):
    """``(S_p + 1e-4) mean_g ||W_O v_p||_1`` decides over what the best of ``S`` leave of each head's budget.

    How many tokens a head gets is decided by the base score alone. In a head where that falls below 0, the score in the
    product is shifted up, so that its least one is 0. Of gates the product takes the probability.

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

    @cached_property
    def needs(self) -> Needs:
        """What the base needs, and the output projection."""
        return replace(super().needs, output_projection=True)

    def note(self, inputs: ScorerInputs, records: Records) -> None:
        """Record ``mean_g ||W_O v||_1`` too, ``[B, Hkv, N]``, computed once for each token."""
        super().note(inputs, records)
        sizes_so_far = records.get("size", torch.zeros_like(inputs.v[..., 0]))  # tokens that came since have 0
        missing = inputs.key_valid & (sizes_so_far == 0)
        width = int(missing.sum(-1).max())
        if width:
            order = missing.long().argsort(dim=-1, descending=True, stable=True)[..., :width]
            values = inputs.v.gather(2, order[..., None].expand(-1, -1, -1, inputs.v.shape[-1]))
            sizes = grouped(projected_norms(values, inputs.output, 1), inputs, "mean")
            sizes_so_far = sizes_so_far.scatter(-1, order, sizes)
        records["size"] = sizes_so_far

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the base score, by which heads and layers compete."""
        return self.inner.score(inputs)

    def second(self, inputs: ScorerInputs, score: Tensor) -> tuple[Tensor, float]:
        """Return the product, by which the tokens of one head compete, and the share that the first score fills."""
        weight = self.inner.weight(inputs, score)
        lowest = weight.masked_fill(~inputs.key_valid, float("inf")).amin(-1, keepdim=True)
        return (weight - lowest.clamp_max(0.0) + SMALL) * self.recorded(inputs)["size"], self.first
