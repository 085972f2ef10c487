"""Whole tokens from shares, with an exact total."""

from __future__ import annotations

import torch
from torch import Tensor


def largest_remainder(shares: Tensor, total: Tensor, caps: Tensor) -> Tensor:
    """Round shares to integers with an exact total; of equal remainders the lower layer is rounded up first.

    Args:
        shares: ``[B, L]`` float64, not above ``caps``, summing to ``total`` (or to all caps, when those are less).
        total: ``[B]`` long.
        caps: ``[B, L]`` long, as the result.
    """
    floors = shares.floor().long().minimum(caps)
    missing = torch.minimum(total, caps.sum(1)) - floors.sum(1)
    remainder = (shares - floors).round(decimals=9)  # equal ones stay equal, whatever their last bits
    order = remainder.masked_fill(floors >= caps, -1.0).argsort(dim=1, descending=True, stable=True)
    order_position = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return floors + (order_position < missing[:, None])
