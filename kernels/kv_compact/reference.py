"""Rows in blocks closed up, as lists and sorts: the oracle of the fast versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.kernels.pages import Pages, gathered


class Worst(NamedTuple):
    """Which tokens of rows go, by their scores: all but some number of each row.

    First go ranks up to ``expired_to``, whatever they scored and even where they are protected; then the lowest scores
    of what is not protected, of equal ones the newest first. Protected are ranks below ``sinks``, from ``recent_from``
    on, and where ``protected`` says so. Where more tokens are protected than are to stay, they all stay.
    """

    stays: Tensor  # [R] int32, tokens that stay; rows that hold no more lose nothing
    score: Tensor  # [B, Hkv or 1, S] float32 by slot, S at least the longest row
    sinks: Tensor  # [B] long
    recent_from: Tensor  # [B] long
    expired_to: Tensor  # [B] long, -1 where nothing has expired
    found: Tensor  # [1] int32, becomes 1 where the score of a token that may go by its score is not finite
    protected: Tensor | None = None  # [B, M] bool, by rank; ranks from M on are not protected so


def reference_kv_compact(pages: Pages, keep: Tensor | Worst, records: Sequence[Tensor] = ()) -> None:
    """Do what :func:`ag.kernels.kv_compact.kv_compact` does."""
    stays = best(pages, keep) if isinstance(keep, Worst) else keep
    page = pages.keys.shape[1]
    for row, table in enumerate(pages.table.tolist()):
        length = int(pages.lengths[row])
        kept = stays[row, :length].nonzero()[:, 0].tolist()
        holes = [slot for slot in range(len(kept)) if not stays[row, slot]]
        for hole, slot in zip(holes, [slot for slot in kept if slot >= len(kept)], strict=True):
            source, target = ((table[x // page], x % page) for x in (slot, hole))
            for column in pages.columns:
                column[target] = column[source].clone()
            for record in records:
                record[row, :, hole] = record[row, :, slot]
        for record in records:
            record[row, :, len(kept) : length] = 0
        pages.lengths[row] = len(kept)


def best(pages: Pages, worst: Worst) -> Tensor:
    """Return ``[R, N]`` bool, the slots that stay; N is the width of the table."""
    score, rivals, ranks = going_first(pages, worst)
    keep = torch.ones_like(rivals)
    for row, going in enumerate((pages.lengths - worst.stays).clamp_min(0).tolist()):
        slots = rivals[row].nonzero()[:, 0].tolist()
        slots.sort(key=lambda slot: (float(score[row, slot]), -int(ranks[row, slot])))
        keep[row, slots[:going]] = False
    return keep


def going_first(pages: Pages, worst: Worst) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores ``[R, N]`` by which tokens go, the lowest first; which tokens may go; and all ranks.

    The score is ``-inf`` for what has expired, and ``inf`` for what may not go. Takes note of scores that are not
    finite.
    """
    heads = len(pages.table) // len(worst.sinks)
    index, there = gathered(pages.table, pages.lengths, pages.keys.shape[1])
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
    surplus = (pages.lengths > worst.stays)[:, None]
    worst.found.logical_or_((rivals & surplus & ~score.isfinite()).any())
    score = score.masked_fill(~rivals, float("inf")).masked_fill(expired, float("-inf"))
    return score, rivals | expired, ranks
