"""Sums of row statistics by their formulas."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Kind = Literal["attention", "value", "key", "joint"]
KINDS: tuple[Kind, ...] = ("attention", "value", "key", "joint")


def reference_row_statistics(
    kind: Kind,
    logits: Tensor,
    counted: Tensor,
    value_norms: Tensor | None = None,
    dots: Tensor | None = None,
    output_norms: Tensor | None = None,
) -> Tensor:
    """Compute :func:`ag.kernels.row_statistics.row_statistics` with several tensors of the size of the logits."""
    hidden = logits == float("-inf")
    a, s = logits.softmax(-1).masked_fill(hidden, 0.0), logits.masked_fill(hidden, 0.0)
    values = a
    if value_norms is not None:
        v = value_norms.repeat_interleave(logits.shape[1] // value_norms.shape[1], 1)[:, :, None]
        values = a.square() * v
        if dots is not None and output_norms is not None:
            o = output_norms[..., None]
            by_value, by_key = (1 + s if kind == "joint" else s), s  # the change is A (by_value v - by_key o)
            change = by_value.square() * v - 2 * by_value * by_key * dots + by_key.square() * o
            values = a.square() * change.clamp_min(0.0)
    return values.masked_fill(~counted[:, None, :, None], 0.0).sum(2)
