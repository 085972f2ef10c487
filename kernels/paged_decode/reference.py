"""Decoding over rows in pages, gathered into padded rows: the oracle of the fast versions."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.pages import Pages, gathered, read
from ag.kernels.softmax import PLAIN, Softmax, weigh


def reference_paged_decode(
    q: Tensor, pages: Pages, scaling: float, weights: Tensor | None = None, softmax: Softmax = PLAIN
) -> Tensor:
    """Compute :func:`ag.kernels.paged_decode.paged_decode` as ``softmax(scaling q K^T) V`` of each row."""
    acc = torch.promote_types(q.dtype, torch.float32)
    index, there = gathered(pages.table, pages.lengths, pages.keys.shape[1])
    # what lies in free slots may be no number
    k, v = (x.to(acc).masked_fill(~there[:, :, None], 0) for x in read(pages, index))
    s = softmax.capped(q.reshape(len(there), -1, q.shape[-1]).to(acc) @ k.mT * scaling)
    hidden, sinks = ~there[:, None], softmax.by_row(*s.shape[:2])
    a = weigh(s.masked_fill(hidden, float("-inf")), None if sinks is None else sinks[:, :, None])
    a = a.masked_fill(hidden, 0)
    if weights is not None:
        weights.copy_(a.view(weights.shape))
    return (a @ v).to(q.dtype).view(*q.shape[:-1], -1)
