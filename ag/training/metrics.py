"""Metrics of a validation pass, synchronised over ranks by torchmetrics."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from ag.gates.calibration import SHARES


class EvictedShare(Metric):
    """Share of gated tokens that are evicted, by layer and KV head."""

    evicted: Tensor
    tokens: Tensor

    def __init__(self, layers: int, heads: int) -> None:
        super().__init__()
        self.add_state("evicted", torch.zeros(layers, heads, dtype=torch.double), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.double), dist_reduce_fx="sum")

    def update(self, evicted: Tensor, counted: Tensor) -> None:
        """Count a batch: ``evicted [L, B, Hkv, T]`` of the tokens ``[B, T]`` that gates may evict."""
        self.evicted += (evicted & counted[None, :, None]).sum((1, 3))
        self.tokens += counted.sum()

    def compute(self) -> Tensor:
        """Return ``[L, Hkv]``."""
        return self.evicted / self.tokens.clamp_min(1)


class LogitCounts(Metric):
    """Counts of gate logits in narrow bins, for the boundary of a share.

    The bins are equal in ``asinh`` of the logit: 0.0001 wide near 0, and wider in proportion to large logits.
    """

    BINS, REACH = 1 << 18, 12.0  # asinh of logits up to 80 thousand

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(self.BINS, dtype=torch.double), dist_reduce_fx="sum")

    def update(self, logits: Tensor) -> None:
        """Count logits ``[N]``."""
        bin_index = (logits.detach().double().asinh() / self.REACH + 1) * (self.BINS / 2)
        self.counts += torch.bincount(bin_index.long().clamp(0, self.BINS - 1), minlength=self.BINS)

    def compute(self) -> Tensor:
        """Return the logits ``[19]``, double, above which the shares 0.05, 0.1, ... 0.95 lie; nan without logits."""
        below = self.counts.cumsum(0)
        target_counts = (1 - torch.tensor(SHARES, dtype=torch.double, device=below.device)) * below[-1]
        bin_index = torch.searchsorted(below, target_counts).clamp_max(self.BINS - 1)
        fraction = 1 - (below[bin_index] - target_counts) / self.counts[bin_index]
        return (((bin_index + fraction) * (2 / self.BINS) - 1) * self.REACH).sinh()


class MultipleChoiceAccuracy(MeanMetric):
    """Share of questions whose right answer has the highest log-likelihood; nan without questions.

    With ``normalise`` log-likelihoods are divided by the number of the answer's tokens.
    """

    def __init__(self, normalise: bool = False) -> None:
        super().__init__()
        self.normalise = normalise

    def update(  # type: ignore[override]
        self, nll: Tensor, rows: Tensor, question: Tensor, choice: Tensor, target: Tensor
    ) -> None:
        """Count a batch that holds all rows of its questions.

        ``nll`` ``[N]`` are the losses of answer tokens, and ``rows`` ``[N]`` their rows. Each row has one value in
        ``question``, ``choice`` and ``target`` ``[B]``: its question (negative in a filler row), the answer that it
        holds, and the right answer.
        """
        scores = nll.new_zeros(len(question)).index_add(0, rows, -nll)
        if self.normalise:
            scores = scores / rows.bincount(minlength=len(question)).clamp_min(1)
        for index in question[question >= 0].unique():
            question_rows = (question == index).nonzero().flatten()
            best = question_rows[scores[question_rows].argmax()]
            super().update((choice[best] == target[best]).float())
