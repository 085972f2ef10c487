"""Attention to rows in pages, gathered into padded rows: the tests compare the fast versions with it."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.pages import Pages, gathered, read
from ag.kernels.softmax import PLAIN, Softmax
from ag.kernels.softmax import weigh as weights_of

BLOCK = 256  # queries that meet the rows at once
NEWEST = torch.iinfo(torch.int32).max  # a token index that no token exceeds


def paged_attention(
    q: Tensor,
    pages: Pages,
    query_indices: Tensor | None,
    scaling: float,
    window: int | None = None,
    recent: int | None = None,
    softmax: Softmax = PLAIN,
    weigh: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`ag.kernels.paged_attention.paged_attention` as ``softmax(scaling q K^T + mask) V`` of each row."""
    acc, rows, gate = torch.promote_types(q.dtype, torch.float32), len(pages.block_table), pages.gate
    pool_index, valid = gathered(pages.block_table, pages.lengths, pages.keys.shape[1])
    # free slots may have NaN
    k, v = (x.to(acc).masked_fill(~valid[:, :, None], 0)[:, None] for x in read(pages, pool_index))
    key_index = pages.token_indices.flatten()[pool_index][:, None, None]
    sinks = softmax.by_row(rows, q.shape[0] * q.shape[1] // rows)
    sink_logits = None if sinks is None else sinks[:, :, None, None]
    outs, a = [], q.new_empty(0)
    if query_indices is None:
        query_indices = torch.full((len(q), q.shape[2]), NEWEST, device=q.device)
    for query_tile, tile_indices in zip(q.split(BLOCK, 2), query_indices.split(BLOCK, 1), strict=True):
        query_index = tile_indices.repeat_interleave(rows // len(query_indices), 0)[:, None, :, None]
        hidden = (key_index > query_index) | ~valid[:, None, None]
        if window is not None:
            hidden = hidden | (key_index <= query_index - window)
        if recent is not None and gate is not None:
            hidden = hidden | ((key_index <= query_index - recent) & ~gate.flatten()[pool_index][:, None, None])
        with torch.autocast(q.device.type, enabled=False):
            s = softmax.capped(query_tile.reshape(rows, -1, *query_tile.shape[2:]).to(acc) @ k.mT * scaling)
            a = weights_of(s.masked_fill(hidden, float("-inf")), sink_logits).masked_fill(hidden, 0)
            outs.append((a @ v).to(q.dtype).view(*query_tile.shape[:3], -1))
    return torch.cat(outs, 2), a.view(*q.shape[:2], a.shape[-1]).float() if weigh else None
