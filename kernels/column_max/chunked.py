"""Column maxima in blocks of queries: memory linear in T."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.gated_attention.masks import pair_masks, sink_mask

BLOCK = 128  # queries handled at once


def chunked_column_max(
    q: Tensor,
    k: Tensor,
    scaling: float,
    queries: Tensor,
    key_valid: Tensor | None = None,
    window: int | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """Compute :func:`ag.kernels.column_max.column_max` with memory linear in T."""
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    acc = torch.promote_types(q.dtype, torch.float32)
    largest = torch.zeros(batch, kv_heads, heads // kv_heads, length, dtype=acc, device=q.device)
    index = torch.arange(length, device=q.device)
    no_sinks = sink_mask(None, 0, batch, length, q.device)
    counting = queries.any(0).nonzero()
    first = int(counting[0]) if len(counting) else length
    for start in range(first, length, BLOCK):
        stop = min(start + BLOCK, length)
        valid = None if key_valid is None else key_valid[:, :stop]
        visible, _ = pair_masks(index[start:stop], index[:stop], valid, no_sinks[:, :stop], 1, window, None)
        tile = q[:, :, start:stop].reshape(batch, kv_heads, -1, dim)
        if q.dtype == torch.float16:  # products that are not scaled may overflow it
            s = ((tile * scaling) @ k[:, :, :stop].mT).to(acc)
        else:
            s = (tile @ k[:, :, :stop].mT).to(acc) * scaling
        s = s.view(batch, kv_heads, -1, stop - start, stop).masked_fill_(~visible[:, :, None], float("-inf"))
        weights = s.softmax(-1).nan_to_num_(0.0)  # a padding query sees nothing
        weights.masked_fill_(~queries[:, None, None, start:stop, None], 0.0)
        if factors is not None:
            weights *= factors[:, None, None, start:stop, None].to(acc)
        largest[..., :stop] = torch.maximum(largest[..., :stop], weights.amax(3))
    return largest.flatten(1, 2)
