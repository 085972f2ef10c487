"""Causal attention weights, in blocks of queries or whole: what column sums and column maxima are made of.

The M queries are those of the last M of T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ag.kernels.gated_attention.masks import pair_masks, sink_mask
from ag.kernels.softmax import PLAIN, Softmax, weigh

BLOCK = 128  # queries handled at once


class Block(NamedTuple):
    """The weights of a block of queries.

    Attributes:
        rows: which queries these are.
        weights: ``[B, Hkv, G, w, N]``, on the first N keys, which are all that they see; 0 in a row that sees nothing.
        visible: ``[B or 1, 1, w, N]`` bool, the pairs that the softmax runs over.
        near: ``[B, 1, w, N]`` bool, the pairs less than ``skip`` apart.
    """

    rows: slice
    weights: Tensor
    visible: Tensor
    near: Tensor


def blocks(
    q: Tensor,
    k: Tensor,
    scaling: float,
    queries: Tensor,
    key_valid: Tensor | None,
    window: int | None,
    skip: int = 0,
    softmax: Softmax = PLAIN,
) -> Iterator[Block]:
    """Yield the weights of all queries from the first that counts on; the arguments are those of column sums."""
    batch, _, count, dim = q.shape
    kv_heads, length, acc = k.shape[1], k.shape[2], torch.promote_types(q.dtype, torch.float32)
    ahead = length - count
    index = torch.arange(length, device=q.device)
    no_sinks = sink_mask(None, 0, batch, length, q.device)
    counting = queries.any(0).nonzero()
    sinks = None if softmax.sinks is None else softmax.sinks.view(1, kv_heads, -1, 1, 1)
    for start in range(int(counting[0]) if len(counting) else count, count, BLOCK):
        stop = min(start + BLOCK, count)
        seen = ahead + stop
        valid = None if key_valid is None else key_valid[:, :seen]
        places = index[ahead + start : seen]
        visible, near = pair_masks(places, index[:seen], valid, no_sinks[:, :seen], skip, window, None)
        tile = q[:, :, start:stop].reshape(batch, kv_heads, -1, dim)
        if q.dtype == torch.float16:  # products that are not scaled may overflow it
            s = ((tile * scaling) @ k[:, :, :seen].mT).to(acc)
        else:
            s = (tile @ k[:, :, :seen].mT).to(acc) * scaling
        s = softmax.capped(s).view(batch, kv_heads, -1, stop - start, seen)
        s = s.masked_fill_(~visible[:, :, None], float("-inf"))
        yield Block(slice(start, stop), weigh(s, sinks).nan_to_num_(0.0), visible, near)


def whole(
    q: Tensor,
    k: Tensor,
    scaling: float,
    key_valid: Tensor | None,
    window: int | None,
    skip: int = 0,
    softmax: Softmax = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all weights ``[B, H, M, T]``, which pairs are visible, and which are less than ``skip`` apart."""
    batch, heads, count, _ = q.shape
    length = k.shape[2]
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    index = torch.arange(length, device=q.device)
    no_sinks = sink_mask(None, 0, batch, length, q.device)
    visible, near = pair_masks(index[length - count :], index, key_valid, no_sinks, skip, window, None)
    s = softmax.capped((q @ k.repeat_interleave(heads // k.shape[1], 1).mT) * scaling)
    weights = weigh(s.masked_fill(~visible, float("-inf")), softmax.by_head(4))
    return weights.nan_to_num(0.0), visible, near
