"""Column sums in blocks of queries: memory linear in T."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.gated_attention.masks import pair_masks, sink_mask

BLOCK = 128  # queries handled at once


def chunked_column_sums(
    q: Tensor,
    k: Tensor,
    scaling: float,
    queries: Tensor,
    key_valid: Tensor | None = None,
    window: int | None = None,
    power: int = 1,
    skip: int = 0,
    mean: bool = False,
) -> Tensor:
    """Compute :func:`ag.kernels.column_sums.column_sums` with memory linear in T."""
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    acc = torch.promote_types(q.dtype, torch.float32)
    sums = torch.zeros(batch, kv_heads, heads // kv_heads, length, dtype=acc, device=q.device)
    counts = torch.zeros(batch, 1, length, dtype=acc, device=q.device)
    index = torch.arange(length, device=q.device)
    no_sinks = sink_mask(None, 0, batch, length, q.device)
    counting = queries.any(0).nonzero()
    first = int(counting[0]) if len(counting) else length
    for start in range(first, length, BLOCK):
        stop = min(start + BLOCK, length)
        valid = None if key_valid is None else key_valid[:, :stop]
        visible, protected = pair_masks(
            index[start:stop], index[:stop], valid, no_sinks[:, :stop], max(skip, 1), window, None
        )
        tile = q[:, :, start:stop].reshape(batch, kv_heads, -1, dim)
        if q.dtype == torch.float16:  # products that are not scaled may overflow it
            s = ((tile * scaling) @ k[:, :, :stop].mT).to(acc)
        else:
            s = (tile @ k[:, :, :stop].mT).to(acc) * scaling
        s = s.view(batch, kv_heads, -1, stop - start, stop).masked_fill(~visible[:, :, None], float("-inf"))
        weights = s.softmax(-1).nan_to_num_(0.0)  # a padding query sees nothing
        counted = visible & queries[:, None, start:stop, None]
        counted = counted & ~protected if skip else counted
        sums[..., :stop] += (weights**power).masked_fill_(~counted[:, :, None], 0.0).sum(3)
        counts[..., :stop] += counted.sum(2)
    if mean:
        sums /= counts.clamp_min(1)[:, :, None]
    return sums.flatten(1, 2)
