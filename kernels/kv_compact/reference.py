"""Rows in blocks closed up, as lists and sorts: the oracle of the fast versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ag.kernels.pages import Pages, gathered


class Worst(NamedTuple):
    """Which tokens of rows go, by their scores: all but ``count`` of each row, in the order

    1. ranks up to ``expired_to``, whatever they scored and even where they are protected;
    2. the lowest scores of what is not protected, of equal ones the newest first.

    Protected are ranks below ``sinks``, from ``recent_from`` on, and where ``stays`` says so. Where more tokens are
    protected than ``count``, they all stay.
    """

    count: Tensor  # [R] int32, tokens that stay; rows that hold no more lose nothing
    score: Tensor  # [B, Hkv or 1, S] float32 by slot, S at least the longest row
    sinks: Tensor  # [B] long
    recent_from: Tensor  # [B] long
    expired_to: Tensor  # [B] long, -1 where nothing has expired
    found: Tensor  # [1] int32, becomes 1 where the score of a token that may go by its score is not finite
    stays: Tensor | None = None  # [B, M] bool, by rank; ranks from M on are not protected so


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
    rows, heads = len(pages.table), len(pages.table) // len(worst.sinks)
    index, there = gathered(pages.table, pages.lengths, pages.keys.shape[1])
    ranks = pages.ranks.flatten()[index].masked_fill(~there, -1).long()
    sinks, recent_from, expired_to = (
        x.repeat_interleave(heads)[:, None] for x in (worst.sinks, worst.recent_from, worst.expired_to)
    )
    score = worst.score.expand(-1, heads, -1).flatten(0, 1)[:, : ranks.shape[1]]
    score = torch.nn.functional.pad(score, (0, ranks.shape[1] - score.shape[1]))
    protected = (ranks < sinks) | (ranks >= recent_from)
    if worst.stays is not None:
        inside = ranks.clamp(0, worst.stays.shape[1] - 1)
        protected |= (ranks < worst.stays.shape[1]) & worst.stays.repeat_interleave(heads, 0).gather(1, inside)
    expired = there & (ranks <= expired_to)
    rivals = there & ~protected & ~expired
    going = (pages.lengths - worst.count).clamp_min(0)
    if bool((rivals & ~score.isfinite())[going > 0].any()):
        worst.found.fill_(1)
    keep = there.clone()
    for row in range(rows):
        slots = (expired[row] | rivals[row]).nonzero()[:, 0].tolist()
        slots.sort(key=lambda n: (not expired[row, n], 0.0 if expired[row, n] else float(score[row, n]), -ranks[row, n]))
        keep[row, slots[: int(going[row])]] = False
    return keep
