"""New tokens into pages, token by token: the oracle of the fast versions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ag.kernels.pages import New, Pages


def reference_pool_append(
    pages: Pages, new: New | None = None, victims: Tensor | None = None, records: Sequence[Tensor] = ()
) -> None:
    """Do what :func:`ag.kernels.pool_append.pool_append` does."""
    page, rows = pages.keys.shape[1], len(pages.table)
    fresh: list[Tensor] = []
    if new is not None:
        ranks = new.ranks.repeat_interleave(rows // len(new.ranks))
        fresh = [new.keys.flatten(0, 1), new.values.flatten(0, 1), ranks]
        if pages.gate is not None:
            fresh.append(torch.ones_like(ranks) if new.gate is None else new.gate.flatten())
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
