"""Rows in blocks closed up by PyTorch's sorts and index operations, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ag.kernels.kv_compact.reference import Worst, going_first
from ag.kernels.pages import Pages, gathered


def chunked_kv_compact(pages: Pages, keep: Tensor | Worst, records: Sequence[Tensor] = ()) -> None:
    """Do what :func:`ag.kernels.kv_compact.kv_compact` does; on a card the host waits to learn what moves."""
    if isinstance(keep, Worst):
        score, rivals, ranks = going_first(pages, keep)
        going = (pages.lengths - keep.stays).clamp_min(0)
        newest_first = ranks.argsort(dim=1, descending=True)
        order = newest_first.gather(1, score.gather(1, newest_first).argsort(dim=1, stable=True))
        goes = torch.zeros_like(rivals).scatter_(
            1, order, torch.arange(order.shape[1], device=order.device) < going[:, None]
        )
        keep = ~(goes & rivals)
    index, there = gathered(
        pages.table[:, : -(-keep.shape[1] // pages.keys.shape[1])], pages.lengths, pages.keys.shape[1]
    )
    keep = torch.nn.functional.pad(keep, (0, index.shape[1] - keep.shape[1])) & there
    kept = keep.sum(1, keepdim=True)
    inside = torch.arange(keep.shape[1], device=keep.device) < kept
    holes, movers = (x.nonzero(as_tuple=True) for x in (inside & ~keep, ~inside & keep))  # row by row as many of each
    target, source = index[holes], index[movers]
    for column in pages.columns:
        flat = column.view(-1, *column.shape[2:])
        flat.index_copy_(0, target, flat[source])
    for record in records:
        record[holes[0], :, holes[1]] = record[movers[0], :, movers[1]]
        free = torch.arange(record.shape[2], device=record.device) >= kept
        record.masked_fill_(free[:, None], 0.0)
    pages.lengths.copy_(kept[:, 0])
