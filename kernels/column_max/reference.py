"""Column maxima from the whole attention matrix: the oracle of the chunked version."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.gated_attention.masks import pair_masks, sink_mask


def reference_column_max(
    q: Tensor,
    k: Tensor,
    scaling: float,
    queries: Tensor,
    key_valid: Tensor | None = None,
    window: int | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """Compute :func:`ag.kernels.column_max.column_max` with n^2 memory."""
    batch, heads, length, _ = q.shape
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    index = torch.arange(length, device=q.device)
    sink = sink_mask(None, 0, batch, length, q.device)
    visible, _ = pair_masks(index, index, key_valid, sink, 1, window, None)
    s = (q @ k.repeat_interleave(heads // k.shape[1], 1).mT) * scaling
    weights = s.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)
    if factors is not None:
        weights = weights * factors[:, None, :, None].to(weights.dtype)
    return weights.masked_fill(~queries[:, None, :, None], 0.0).amax(2)
