"""Metrics of a validation pass, synchronised over ranks by torchmetrics."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class EvictedShare(Metric):
    """Share of gated tokens that are evicted, by layer and head.

    Args:
        layers: gated layers.
        heads: KV heads Hkv.
    """

    evicted: Tensor
    tokens: Tensor

    def __init__(self, layers: int, heads: int) -> None:
        super().__init__()
        self.add_state("evicted", torch.zeros(layers, heads, dtype=torch.double), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.double), dist_reduce_fx="sum")

    def update(self, evicted: Tensor, counted: Tensor) -> None:
        """Count a batch.

        Args:
            evicted: ``[L, B, Hkv, T]`` bool, True on evicted tokens.
            counted: ``[B, T]`` bool, the tokens that gates may evict.
        """
        self.evicted += (evicted & counted[None, :, None]).sum((1, 3))
        self.tokens += counted.sum()

    def compute(self) -> Tensor:
        """Return ``[L, Hkv]``."""
        return self.evicted / self.tokens.clamp_min(1)


class MultipleChoiceAccuracy(Metric):
    """Share of questions whose right answer has the highest log-likelihood.

    Args:
        normalise: divide the log-likelihood by the number of the answer's tokens.
    """

    correct: Tensor
    questions: Tensor

    def __init__(self, normalise: bool = False) -> None:
        super().__init__()
        self.normalise = normalise
        self.add_state("correct", torch.zeros((), dtype=torch.double), dist_reduce_fx="sum")
        self.add_state("questions", torch.zeros((), dtype=torch.double), dist_reduce_fx="sum")

    def update(self, nll: Tensor, rows: Tensor, question: Tensor, choice: Tensor, target: Tensor) -> None:
        """Count a batch that holds all rows of its questions.

        Args:
            nll: negative log-likelihood ``[N]`` of each answer token.
            rows: ``[N]``, the row of each.
            question: ``[B]``, which question a row belongs to; negative rows are padding.
            choice: ``[B]``, which answer a row holds.
            target: ``[B]``, the right answer.
        """
        scores = nll.new_zeros(len(question)).index_add(0, rows, -nll)
        if self.normalise:
            scores = scores / nll.new_zeros(len(question)).index_add(0, rows, torch.ones_like(nll)).clamp_min(1)
        for index in question[question >= 0].unique():
            mine = (question == index).nonzero().flatten()
            best = mine[scores[mine].argmax()]
            self.correct += (choice[best] == target[best]).double()
            self.questions += 1

    def compute(self) -> Tensor:
        """Return the share, nan without questions."""
        return self.correct / self.questions
