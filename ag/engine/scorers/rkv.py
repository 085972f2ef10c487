"""R-KV: what a window attends to, less what other keys repeat."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.engine.scorer_inputs import ScorerInputs
from ag.engine.scorers.base import Needs, Scorer, pooled
from ag.errors import require

PAIRS = 1 << 22  # of keys, compared at once


@dataclass(frozen=True, kw_only=True)
class RKV(Scorer):
    """``mix I_p - (1 - mix) R_p``: the importance of a token, and the redundancy of its key, by KV head.

    ``I`` is a softmax over the tokens before an observation window, of the largest logit of the group's query heads;
    the mean over the window's queries, max-pooled along those tokens. ``R`` is a softmax over all held tokens of how
    alike a key is to the others on average. For each key the newest of those that are alike (cosine above
    ``threshold``) does not count as alike to it, so that of a repeated thought the latest stays.

    Source: Cai et al. 2025, "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", arXiv 2505.24133; code
    Zefan-Cai/R-KV (``R1KV``, ``retain_direction=last``), published with ``steps:128``. Deviations: a key to which none
    is alike leaves the others as they are, where the code takes the first token for its newest one; ``mix`` is the
    paper's 0.1 (the class of the code has 0.07); a decision at the end of a prompt too; float32 throughout.

    Attributes:
        window: last queries that observe; their tokens stay and count within the budget.
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
        """The queries of the window."""
        return Needs(rows=True, lookback=self.window - 1, observers=self.window)

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the importance less the redundancy; above -1 and at most 1."""
        return self.mix * self.importance(inputs) - (1 - self.mix) * self.redundancy(inputs)

    def importance(self, inputs: ScorerInputs) -> Tensor:
        """Return ``I``, ``[B, Hkv, N]``; near the window what the pooling reaches, and 0 behind that."""
        rows, before_window = inputs.rows(self.window), inputs.key_valid & (inputs.age >= self.window)
        shown = rows.visible.unflatten(1, (-1, inputs.group)).any(2) & before_window[:, :, None]
        logits = rows.s.masked_fill(~rows.visible, float("-inf")).unflatten(1, (-1, inputs.group)).amax(2)
        weights = logits.masked_fill(~shown, float("-inf")).softmax(-1).masked_fill(~shown, 0.0)
        counted = rows.counted[:, None, :, None]
        mean = weights.masked_fill(~counted, 0.0).sum(2) / counted.sum(2).clamp_min(1)
        return pooled(mean, before_window, self.kernel, "max", inputs.keys.order)

    def redundancy(self, inputs: ScorerInputs) -> Tensor:
        """Return ``R``, ``[B, Hkv, N]``, which sums to 1 over the tokens of a head."""
        valid = inputs.key_valid
        keys = F.normalize(inputs.k.float().masked_fill(~valid[..., None], 0.0), dim=-1)
        token_indices = inputs.key_indices.masked_fill(~valid, -1)
        slots = torch.arange(keys.shape[2], device=keys.device)
        alike = torch.zeros(keys.shape[:3], device=keys.device)
        for query_slots in slots.split(max(1, PAIRS // max(1, alike.numel()))):
            cosine = (keys[:, :, query_slots] @ keys.mT).masked_fill_(slots == query_slots[:, None], 0.0)
            newest, newest_slot = torch.where(cosine > self.threshold, token_indices[:, :, None], -1).max(
                -1, keepdim=True
            )
            dropped = torch.where(newest >= 0, newest_slot, len(slots))  # past the end: none
            cosine = F.pad(cosine, (0, 1)).scatter_(-1, dropped, 0.0)[..., :-1]
            alike += cosine.sum(2)
        mean = alike / valid.sum(-1, keepdim=True).clamp_min(1)
        return mean.masked_fill(~valid, float("-inf")).softmax(-1)

    def limits(self, capacity: Tensor) -> tuple[int, int]:
        """Return the sinks, and the window or the newest tokens."""
        return self.sinks, max(self.window, self.recent)
