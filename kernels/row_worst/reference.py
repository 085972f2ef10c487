"""The worst token of each row in a few PyTorch operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Worst(NamedTuple):
    """What is to be known of rows before one token of each goes; slots without a token do not count."""

    held: Tensor  # [B, Hkv] long, tokens of the row
    fixed: Tensor  # [B, Hkv] long, those of them that are protected
    finite: Tensor  # [B, Hkv] bool, whether all scores that compete are finite
    rest: Tensor  # [B, Hkv, N] bool, the tokens without the one that goes; all of them where none competes


def reference_row_worst(score: Tensor, protected: Tensor, valid: Tensor) -> Worst:
    """Do what :func:`ag.kernels.row_worst.row_worst` does."""
    rivals = valid & ~protected
    held = valid.sum(-1)
    scores = score.masked_fill(~rivals, float("inf"))
    lowest = scores.amin(-1, keepdim=True) if scores.shape[-1] else scores  # no slots: there is none
    last = (rivals & (score == lowest)).cumsum(-1)  # of equal ones the last
    gone = rivals & (score == lowest) & (last == last[..., -1:])
    return Worst(held, held - rivals.sum(-1), (torch.isfinite(score) | ~rivals).all(-1), valid & ~gone)
