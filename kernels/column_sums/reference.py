"""Column sums from the whole attention matrix: the oracle of the chunked version."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.gated_attention.masks import pair_masks, sink_mask


def reference_column_sums(
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
    """Compute :func:`ag.kernels.column_sums.column_sums` with n^2 memory."""
    batch, heads, length, _ = q.shape
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    index = torch.arange(length, device=q.device)
    sink = sink_mask(None, 0, batch, length, q.device)
    visible, protected = pair_masks(index, index, key_valid, sink, max(skip, 1), window, None)
    s = (q @ k.repeat_interleave(heads // k.shape[1], 1).mT) * scaling
    weights = s.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)
    counted = visible & queries[:, None, :, None]
    counted = counted & ~protected if skip else counted
    sums = (weights**power * counted).sum(2)
    return sums / counted.sum(2).clamp_min(1) if mean else sums
