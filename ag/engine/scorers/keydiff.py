"""KeyDiff: keys that differ from the mean direction of all cached keys."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import Scorer


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Scorer):
    """``-cos(k_p, a)`` with ``a`` the mean of the unit keys that the head holds. It needs no queries.

    Source: Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments"; after NVIDIA/kvpress. Published with prompts read in blocks (``blocks:128``).
    """

    needs = Needs(keys=True, key_valid=True, steady=True)

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the negative cosine, in [-1, 1]; 0 where the unit keys cancel."""
        unit = F.normalize(inputs.keys.float().masked_fill(~inputs.key_valid[..., None], 0.0), dim=-1)
        mean = unit.sum(2, keepdim=True)  # its length does not matter
        negative: Tensor = -(unit * F.normalize(mean, dim=-1)).sum(-1)
        return negative.clamp(-1.0, 1.0)
