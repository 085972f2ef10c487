"""Which pairs of query and key are visible, and which of them no flag can hide."""

from __future__ import annotations

import torch
from torch import Tensor


def sink_mask(
    key_valid: Tensor | None,
    sinks: int,
    batch: int,
    length: int,
    device: torch.device,
    first: Tensor | None = None,
) -> Tensor:
    """Return ``[B, T]`` bool: True on the first ``sinks`` tokens of each row, or document, padding not counted."""
    if key_valid is None and first is None:
        return (torch.arange(length, device=device) < sinks).expand(batch, length)
    valid = torch.ones(batch, length, dtype=torch.bool, device=device) if key_valid is None else key_valid
    rank = valid.cumsum(1)
    if first is not None:
        rank = rank - (rank - valid.long()).gather(1, first)
    return valid & (rank <= sinks)


def pair_masks(
    rows: Tensor,
    columns: Tensor,
    key_valid: Tensor | None,
    sink: Tensor,
    recent: int,
    window: int | None,
    dense_until: Tensor | None,
    first: Tensor | None = None,
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
        first: ``[B, R]`` or None; columns below it are invisible.
    """
    distance = rows[:, None] - columns[None, :]
    visible = (distance >= 0)[None, None]
    if window is not None:
        visible = visible & (distance < window)
    if first is not None:
        visible = visible & (columns >= first[:, :, None])[:, None]
    if key_valid is not None:
        visible = visible & key_valid[:, None, None, :]
    protected = (distance < recent)[None, None] | sink[:, None, None, :]
    if dense_until is not None:
        protected = protected | (rows[None, :] < dense_until[:, None])[:, None, :, None]
    return visible, protected
