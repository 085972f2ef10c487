"""Decoding over ragged rows with PyTorch's own attention, nothing copied."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def chunked_ragged_decode(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, scaling: float
) -> Tensor:
    """Compute :func:`ag.kernels.ragged_decode.ragged_decode` at once where rows are equal and evenly spaced.

    Otherwise row by row; either way the G query heads of a row share one pass over views of its keys and values.
    """
    first, counts = starts.tolist(), lengths.tolist()
    rows = q.reshape(len(first), 1, -1, q.shape[-1])
    steps = {b - a for a, b in zip(first, first[1:], strict=False)} or {0}
    if len(steps) == 1 and len(set(counts)) == 1 and counts[0]:
        k, v = (
            x.as_strided(
                (len(first), 1, counts[0], x.shape[1]),
                (steps.copy().pop() * x.stride(0), 0, *x.stride()),
                x.storage_offset() + first[0] * x.stride(0),
            )
            for x in (keys, values)
        )
        out = F.scaled_dot_product_attention(rows, k, v, scale=scaling)
        return out.reshape(*q.shape[:2], -1)
    out = q.new_zeros(len(first), rows.shape[2], values.shape[-1])
    for row, (start, count) in enumerate(zip(first, counts, strict=True)):
        if count:
            k, v = (x[None, None, start : start + count] for x in (keys, values))
            out[row] = F.scaled_dot_product_attention(rows[row : row + 1], k, v, scale=scaling)[0, 0]
    return out.view(*q.shape[:2], -1)
