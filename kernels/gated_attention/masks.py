"""Which pairs of query and key are visible, and which of them no flag can hide."""

from __future__ import annotations

import torch
from torch import Tensor


def sink_mask(key_valid: Tensor | None, sinks: int, batch: int, length: int, device: torch.device) -> Tensor:
    """Return ``[B, T]`` bool: True on the first ``sinks`` tokens of each row, padding not counted."""
    if key_valid is None:
        return (torch.arange(length, device=device) < sinks).expand(batch, length)
    return key_valid & (key_valid.cumsum(1) <= sinks)


def pair_masks(
    rows: Tensor,
    columns: Tensor,
    key_valid: Tensor | None,
    sink: Tensor,
    recent: int,
    window: int | None,
    dense_until: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the visible and the protected pairs of a tile, both ``[B or 1, 1, rows, columns]`` bool.

    Args:
        rows: query indices ``[R]``.
        columns: key indices ``[C]``.
        key_valid: ``[B, C]`` bool or None.
        sink: ``[B, C]`` bool, from :func:`sink_mask`.
        recent: distance below which a pair is protected.
        window: distance from which a pair is invisible, or None.
        dense_until: ``[B]`` or None; queries below it ignore the flags.
    """
    distance = rows[:, None] - columns[None, :]
    visible = (distance >= 0)[None, None]
    if window is not None:
        visible = visible & (distance < window)
    if key_valid is not None:
        visible = visible & key_valid[:, None, None, :]
    protected = (distance < recent)[None, None] | sink[:, None, None, :]
    if dense_until is not None:
        protected = protected | (rows[None, :] < dense_until[:, None])[:, None, :, None]
    return visible, protected
