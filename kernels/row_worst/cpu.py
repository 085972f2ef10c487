"""The worst token of each row in C++: one pass over the scores."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.row_worst.reference import Going, Worst

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def row_worst(score: Tensor, protected: Tensor, valid: Tensor, ranks: Tensor | None = None) -> Worst:
    """Do what :func:`ag.kernels.row_worst.row_worst` does, on the CPU."""
    number = score.shape[:-1]
    counts = torch.empty(2, *number, dtype=torch.long)
    finite, slot = torch.empty(number, dtype=torch.bool), torch.empty(number, dtype=torch.int32)
    _search(score, protected, valid, ranks, counts, finite, slot, None, 1, None)
    held, fixed = counts
    return Worst(held, fixed, finite, slot)


def row_going(
    score: Tensor, protected: Tensor, valid: Tensor, ranks: Tensor | None, capacity: Tensor, going: Going
) -> None:
    """Do what :func:`ag.kernels.row_worst.row_going` does, on the CPU."""
    _search(score, protected, valid, ranks, None, None, going.slots, capacity.contiguous(), score.shape[1], going.found)


def _search(
    score: Tensor, protected: Tensor, valid: Tensor, ranks: Tensor | None, *others: Tensor | int | None
) -> None:
    rows = (x.contiguous() for x in (score, protected, valid))
    order = None if ranks is None else ranks.int().contiguous()
    KERNEL(*rows, order, score.shape[:-1].numel(), score.shape[-1], *others)


def unavailable(score: Tensor) -> str | None:
    """Return why the C++ version cannot work on a score, or None."""
    if score.dtype != torch.float32:
        return f"a score of {score.dtype} is not float32"
    return KERNEL.unavailable(score)
