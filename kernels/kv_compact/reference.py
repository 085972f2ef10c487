"""Compaction by index operations: the reference, and the version for a CPU without a compiler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ag import retention
from ag.kernels.pages import Pages, gathered


def kv_compact(
    pages: Pages, score: Tensor, keep_count: Tensor, records: Sequence[Tensor] = (), nonfinite: Tensor | None = None
) -> None:
    """Do what :func:`ag.kernels.kv_compact.kv_compact` does; on a GPU the host waits for the number of moved tokens."""
    pool_index, valid = gathered(pages.block_table, pages.lengths, pages.keys.shape[1])
    rows, width = pool_index.shape
    score = score.expand(-1, rows // len(score), -1).flatten(0, 1)[:, :width]
    score = F.pad(score, (0, width - score.shape[1])).masked_fill(~valid, -retention.INF)
    bad = score.isnan() & (pages.lengths > keep_count)[:, None]
    if nonfinite is not None:
        nonfinite.logical_or_(bad.any(1))
    # a free slot has any token index: it comes after the tokens of -inf
    token_index = pages.token_indices.flatten()[pool_index].masked_fill(~valid, torch.iinfo(torch.int32).max)
    keep = retention.keep_mask(score.masked_fill(bad, -retention.INF), keep_count, token_index) & valid
    kept, slots = keep.sum(1, keepdim=True), torch.arange(width, device=keep.device)
    free, moving = (x.nonzero(as_tuple=True) for x in ((slots < kept) & ~keep, (slots >= kept) & keep))
    target, source = pool_index[free], pool_index[moving]  # row by row equally many
    for column in (pages.keys, pages.values, pages.token_indices, pages.gate):
        if column is not None:
            column.flatten(0, 1)[target] = column.flatten(0, 1)[source]
    for record in records:
        record[free[0], :, free[1]] = record[moving[0], :, moving[1]]
        after_end = torch.arange(record.shape[2], device=record.device) >= kept
        record.masked_fill_(after_end[:, None], 0.0)
    pages.lengths.copy_(kept[:, 0])
