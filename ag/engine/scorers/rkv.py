"""R-KV: the attention of a window, less the redundancy of keys that repeat each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers.base import Scorer, pooled
from ag.errors import require

PAIRS = 1 << 22  # of keys, compared at once


@dataclass(frozen=True, kw_only=True)
class RKV(Scorer):
    """``mix I_p - (1 - mix) R_p``: the importance of a token, and the redundancy of its key, by KV head.

    ``I``: the largest logit of the group's query heads goes through a softmax over the tokens before an observation
    window. The mean of this softmax over the window's queries is max-pooled along these tokens. ``R``: the mean cosine
    of a key to all keys goes through a softmax over all cached tokens. Two keys are alike if their cosine is above
    ``threshold``. Among the keys that are alike to a key the newest does not count: the latest token of a repeated
    thought is kept.

    Source: Cai et al. 2025, "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", arXiv 2505.24133; code
    Zefan-Cai/R-KV (``R1KV``, ``retain_direction=last``), published with ``steps:128``. Deviations: if no key is
    alike to a key, all keys count (the code leaves the first token out); ``mix`` is the paper's 0.1 (the class of the
    code has 0.07); a decision at the end of a prompt too; float32 throughout.

    Attributes:
        window: last queries that observe; their tokens are kept and count within the budget.
        kernel: width of the pooling, odd.
        mix: weight of the importance, 0 to 1; the paper's lambda.
        threshold: cosine above which two keys are alike.
    """

    window: int = 8
    kernel: int = 7
    mix: float = 0.1
    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "window", self.window >= 1, "1 or more")
        require(self, "kernel", self.kernel >= 1 and self.kernel % 2 == 1, "an odd number")
        require(self, "mix", 0 <= self.mix <= 1, "0 to 1")
        require(self, "threshold", -1 <= self.threshold <= 1, "-1 to 1")

    @cached_property
    def needs(self) -> Needs:
        """The logits of the window's queries, and the keys in the order of the tokens."""
        return Needs(
            attention_logits=self.window,
            keys=True,
            key_indices=True,
            key_valid=True,
            slot_order=True,
            lookback=self.window - 1,
            observers=self.window,
        )

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the importance less the redundancy; above -1 and at most 1."""
        return self.mix * self.importance(inputs) - (1 - self.mix) * self.redundancy(inputs)

    def importance(self, inputs: ScorerInputs) -> Tensor:
        """Return ``I``, ``[B, Hkv, N]``: 0 on the tokens of the window that the pooling does not reach."""
        logits, query_valid = inputs.attention_logits
        before_window = inputs.key_valid & (inputs.age >= self.window)
        largest = logits.unflatten(1, (-1, inputs.group)).amax(2)  # [B, Hkv, w, N]
        hidden = (largest == float("-inf")) | ~before_window[:, :, None]
        weights = largest.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0.0)
        counted = query_valid[:, None, :, None]
        mean = weights.masked_fill(~counted, 0.0).sum(2) / counted.sum(2).clamp_min(1)
        return pooled(mean, before_window, self.kernel, "max", inputs.slot_order)

    def redundancy(self, inputs: ScorerInputs) -> Tensor:
        """Return ``R``, ``[B, Hkv, N]``, which sums to 1 over the tokens of a head."""
        valid = inputs.key_valid
        keys = F.normalize(inputs.keys.float().masked_fill(~valid[..., None], 0.0), dim=-1)
        token_indices = inputs.key_indices.masked_fill(~valid, -1)
        slots = torch.arange(keys.shape[2], device=keys.device)
        similarity_sum = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
        for query_slots in slots.split(max(1, PAIRS // max(1, similarity_sum.numel()))):
            cosine = (keys[:, :, query_slots] @ keys.mT).masked_fill_(slots == query_slots[:, None], 0.0)
            newest, newest_slot = torch.where(cosine > self.threshold, token_indices[:, :, None], -1).max(
                -1, keepdim=True
            )
            dropped = torch.where(newest >= 0, newest_slot, len(slots))  # past the end: none
            cosine = F.pad(cosine, (0, 1)).scatter_(-1, dropped, 0.0)[..., :-1]
            similarity_sum += cosine.sum(2)
        mean = similarity_sum / valid.sum(-1, keepdim=True).clamp_min(1)
        return mean.masked_fill(~valid, float("-inf")).softmax(-1)

    def limits(self, capacity: Tensor) -> tuple[int, int]:
        """Return the sinks, and the window or the newest tokens."""
        return self.sinks, max(self.window, self.recent)
