"""Attention of one query a head over ragged rows, in float64."""

import torch
from torch import Tensor


def check_weights(
    weights: Tensor,
    out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scaling: float,
) -> None:
    """Hold weights ``[B, H, N]``, and the output ``[B, H, Dv]`` that goes with them, to float64, row by row.

    A logit is a sum of products, which float32 rounds by 4 eps sum |q k|; a weight, a quotient of exponentials, moves
    by twice that, relative to itself. The output, a mean, moves by as much of sum |a v|, and by its type's rounding.
    """
    eps, rounded = torch.finfo(torch.float32).eps, torch.finfo(out.dtype).eps
    by_row = [x.double().flatten(0, 1).unflatten(0, (len(starts), -1)) for x in (q, weights, out)]
    for query, found, mixed, start, length in zip(*by_row, starts.tolist(), lengths.tolist(), strict=True):
        assert not found[:, length:].any()
        k, v = (x[start : start + length].double() for x in (keys, values))
        exact = (scaling * query @ k.T).softmax(-1)
        loose = 4 * eps * (2 + 2 * (scaling * query.abs() @ k.abs().T).amax(-1, keepdim=True)) if length else 0.0
        assert ((found[:, :length] - exact).abs() <= loose * exact + 1e-37).all()
        assert ((mixed - exact @ v).abs() <= (loose + rounded) * (exact @ v.abs())).all()
