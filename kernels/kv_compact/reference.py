"""Compaction by PyTorch's sorts and index operations, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.kernels.pages import Pages, gathered


class Worst(NamedTuple):
    """Scores by which the tokens of a row go until ``stays`` tokens are left.

    Ranks up to ``expired_to`` go first, even protected ones. Then the lowest scores of unprotected tokens go, of equal
    scores the newest first. Protected are ranks below ``sinks``, ranks from ``recent_from`` on, and those that
    ``protected`` marks. If more than ``stays`` tokens are protected, they all stay.
    """

    stays: Tensor  # [R] int32, tokens that stay; shorter rows lose nothing
    score: Tensor  # [B, Hkv or 1, S] float32 by slot, S at least the longest row
    sinks: Tensor  # [B] long
    recent_from: Tensor  # [B] long
    expired_to: Tensor  # [B] long, -1 where nothing has expired
    found: Tensor  # [1] int32, set to 1 if the score of an unprotected token is not finite
    protected: Tensor | None = None  # [B, M] bool, by rank; ranks from M on are not marked


def kv_compact(pages: Pages, keep: Tensor | Worst, records: Sequence[Tensor] = ()) -> None:
    """Do what :func:`ag.kernels.kv_compact.kv_compact` does; on a GPU the host waits for the tokens that move."""
    index, there = gathered(pages.table, pages.lengths, pages.keys.shape[1])
    if isinstance(keep, Worst):
        keep = _best(pages, keep, index, there)
    keep = F.pad(keep, (0, index.shape[1] - keep.shape[1])) & there
    kept, slots = keep.sum(1, keepdim=True), torch.arange(keep.shape[1], device=keep.device)
    holes, movers = (x.nonzero(as_tuple=True) for x in ((slots < kept) & ~keep, (slots >= kept) & keep))
    target, source = index[holes], index[movers]  # row by row as many of each
    for column in pages.columns:
        flat = column.view(-1, *column.shape[2:])
        flat.index_copy_(0, target, flat[source])
    for record in records:
        record[holes[0], :, holes[1]] = record[movers[0], :, movers[1]]
        free = torch.arange(record.shape[2], device=record.device) >= kept
        record.masked_fill_(free[:, None], 0.0)
    pages.lengths.copy_(kept[:, 0])


def _best(pages: Pages, worst: Worst, index: Tensor, there: Tensor) -> Tensor:
    """Return the slots that stay, ``[R, N]`` bool; ``index`` and ``there`` are those of :func:`gathered`."""
    heads = len(pages.table) // len(worst.sinks)
    ranks = pages.ranks.flatten()[index].masked_fill(~there, -1).long()
    sinks, recent_from, expired_to = (
        x.repeat_interleave(heads)[:, None] for x in (worst.sinks, worst.recent_from, worst.expired_to)
    )
    score = worst.score.expand(-1, heads, -1).flatten(0, 1)[:, : ranks.shape[1]]
    score = F.pad(score, (0, ranks.shape[1] - score.shape[1]))
    protected = (ranks < sinks) | (ranks >= recent_from)
    if worst.protected is not None:
        marks = worst.protected.repeat_interleave(heads, 0)
        protected |= (ranks < marks.shape[1]) & marks.gather(1, ranks.clamp(0, marks.shape[1] - 1))
    expired = there & (ranks <= expired_to)
    rivals = there & ~protected & ~expired
    surplus = (pages.lengths - worst.stays).clamp_min(0)[:, None]
    worst.found.logical_or_((rivals & (surplus > 0) & ~score.isfinite()).any())
    score = score.masked_fill(~rivals, float("inf")).masked_fill(expired, float("-inf"))
    newest = ranks.argsort(dim=1, descending=True)  # of equal scores the newer token goes first
    order = newest.gather(1, score.gather(1, newest).argsort(dim=1, stable=True))
    first = torch.arange(order.shape[1], device=order.device) < surplus
    return ~(torch.zeros_like(rivals).scatter_(1, order, first) & (rivals | expired))
