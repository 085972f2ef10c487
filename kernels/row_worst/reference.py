"""The worst token of each row in a few PyTorch operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Worst(NamedTuple):
    """What is to be known of rows before one token of each goes; slots without a token do not count."""

    held: Tensor  # [B, Hkv] long, tokens of the row
    fixed: Tensor  # [B, Hkv] long, those of them that are protected
    finite: Tensor  # [B, Hkv] bool, whether all scores that compete are finite
    slot: Tensor  # [B, Hkv] int32, of the token that goes; -1 where none competes


class Going(NamedTuple):
    """What a step leaves of a decision: the memory is the same at each step."""

    slots: Tensor  # [B, Hkv, 1] int32, of the tokens that go; -1: none does
    found: Tensor  # [B, Hkv] uint8, since it was last 0: NOT_FINITE for a score that competed, OVER


NOT_FINITE, OVER = 1, 2  # OVER: more was protected than the capacity


def reference_row_worst(score: Tensor, protected: Tensor, valid: Tensor, ranks: Tensor | None = None) -> Worst:
    """Do what :func:`ag.kernels.row_worst.row_worst` does."""
    rivals = valid & ~protected
    held = valid.sum(-1)
    slots = torch.arange(score.shape[-1], device=score.device)
    # one more slot, so that there is one, which nothing competes in
    scores = F.pad(score.masked_fill(~rivals, float("inf")), (0, 1), value=float("inf"))
    worst = F.pad(rivals, (0, 1)) & (scores == scores.amin(-1, keepdim=True))
    newest = F.pad((slots if ranks is None else ranks).expand_as(score), (0, 1)).masked_fill(~worst, -1).max(-1)
    slot = torch.where(newest.values < 0, -1, newest.indices)
    finite = (torch.isfinite(score) | ~rivals).all(-1)
    return Worst(held, held - rivals.sum(-1), finite, slot.int())


def reference_row_going(
    score: Tensor, protected: Tensor, valid: Tensor, ranks: Tensor | None, capacity: Tensor, going: Going
) -> None:
    """Do what :func:`ag.kernels.row_worst.row_going` does."""
    worst = reference_row_worst(score, protected, valid, ranks)
    room = capacity[:, None]
    stays = worst.held <= worst.fixed.maximum(room)
    going.slots.copy_(worst.slot.masked_fill(stays, -1)[..., None])
    going.found.bitwise_or_((~worst.finite * NOT_FINITE + (worst.fixed > room) * OVER).to(torch.uint8))
