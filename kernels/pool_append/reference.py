"""New tokens into pages, token by token: the oracle of the fast versions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ag.kernels.pages import New, Pages, Reach, coded


def reference_pool_append(
    pages: Pages,
    new: New | None = None,
    victims: Tensor | None = None,
    records: Sequence[Tensor] = (),
    reach: Reach | None = None,
) -> None:
    """Do what :func:`ag.kernels.pool_append.pool_append` does."""
    page, rows = pages.keys.shape[1], len(pages.table)
    fresh: list[Tensor] = []
    if new is not None:
        ranks = new.ranks.repeat_interleave(rows // len(new.ranks))
        fresh = [*coded(pages, new.keys.flatten(0, 1), new.values.flatten(0, 1)), ranks]
        if pages.gate is not None:
            fresh.append(torch.ones_like(ranks) if new.gate is None else new.gate.flatten())
    if reach is not None:
        assert new is not None
        victims = out_of_reach(pages, new.ranks, reach)
    table, lengths = pages.table.long(), pages.lengths.tolist()
    going = [[]] * rows if victims is None else victims.tolist()
    for row, slots in enumerate(going):

        def at(slot: int, row: int = row) -> tuple[Tensor, int]:
            return table[row, slot // page], slot % page

        if fresh and int(fresh[2][row]) >= 0:
            for column, x in zip(pages.columns, fresh, strict=True):
                column[at(lengths[row])] = x[row].to(column.dtype)
            for record in records:
                record[row, :, lengths[row]] = 0
            lengths[row] += 1
        for slot in sorted((slot for slot in slots if slot >= 0), reverse=True):
            lengths[row] = last = lengths[row] - 1
            for column in pages.columns:
                column[at(slot)] = column[at(last)].clone()
            for record in records:
                record[row, :, slot] = record[row, :, last].clone()
                record[row, :, last] = 0
    pages.lengths.copy_(torch.tensor(lengths))


def out_of_reach(pages: Pages, ranks: Tensor, reach: Reach) -> Tensor:
    """Return the slots ``[R, 2]`` of what new tokens of ranks ``[B]`` no longer see; -1 where a row holds no such."""
    table = pages.table.long()
    slots = torch.arange(table.shape[1] * pages.keys.shape[1], device=table.device)
    there = slots < pages.lengths[:, None]
    held = pages.ranks[table.clamp_min(0)].flatten(1).masked_fill(~there, -1)
    new = ranks.repeat_interleave(len(table) // len(ranks))[:, None]
    found = []
    for distance, closed in ((reach.recent, True), (reach.window, False)):
        goes = there & (held == new - (distance or 0)) & (new >= (distance or 0)) & (distance is not None)
        if closed and pages.gate is not None:
            goes = goes & ~pages.gate[table.clamp_min(0)].flatten(1).bool()
        found.append(torch.where(goes, slots, -1).amax(1))
    first, second = found
    first = first.where(first != second, -1)  # each slot once
    return torch.stack([first, second], 1).int()
