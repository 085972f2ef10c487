"""Decoding over ragged rows, row by row: the oracle of the fast versions."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_ragged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scaling: float,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute :func:`ag.kernels.ragged_decode.ragged_decode` as ``softmax(scaling q K^T) V`` of each row."""
    acc = torch.promote_types(q.dtype, torch.float32)
    rows = []
    for row, (query, start, length) in enumerate(
        zip(q.reshape(len(starts), -1, q.shape[-1]).to(acc), starts.tolist(), lengths.tolist(), strict=True)
    ):
        k, v = (x[start : start + length].to(acc) for x in (keys, values))
        a = (query @ k.T * scaling).softmax(-1)
        rows.append(a @ v)
        if weights is not None:
            of_row = weights.flatten(0, 1).unflatten(0, (len(starts), -1))[row].zero_()
            of_row[:, :length] = a
    return torch.stack(rows).to(q.dtype).view(*q.shape[:2], -1)
