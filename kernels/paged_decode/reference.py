"""Decoding over rows in pages, gathered into padded rows: the oracle of the fast versions."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.pages import Pages, gathered, read


def reference_paged_decode(q: Tensor, pages: Pages, scaling: float, weights: Tensor | None = None) -> Tensor:
    """Compute :func:`ag.kernels.paged_decode.paged_decode` as ``softmax(scaling q K^T) V`` of each row."""
    acc = torch.promote_types(q.dtype, torch.float32)
    index, there = gathered(pages.table, pages.lengths, pages.keys.shape[1])
    # what lies in free slots may be no number
    k, v = (x.to(acc).masked_fill(~there[:, :, None], 0) for x in read(pages, index))
    s = q.reshape(len(there), -1, q.shape[-1]).to(acc) @ k.mT * scaling
    hidden = ~there[:, None]
    a = s.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0)
    if weights is not None:
        weights.copy_(a.view(weights.shape))
    return (a @ v).to(q.dtype).view(*q.shape[:-1], -1)
