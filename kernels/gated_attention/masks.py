"""Visible pairs of query and key, and protected pairs, on which flags have no effect."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Masks(NamedTuple):
    """The masks of B rows of T tokens; see :func:`ag.kernels.gated_attention.gated_attention`."""

    key_valid: Tensor | None = None
    recent: int = 1
    sinks: int = 0
    window: int | None = None
    dense_until: Tensor | None = None
    first: Tensor | None = None

    def sink(self, like: Tensor) -> Tensor:
        """Return which tokens are sinks, ``[B, T]``, of keys or queries ``[B, heads, T, D]``."""
        return sink_mask(self.key_valid, self.sinks, like.shape[0], like.shape[2], like.device, self.first)

    def pairs(self, rows: slice, columns: slice, sink: Tensor) -> tuple[Tensor, Tensor]:
        """Return the visible and the protected pairs of a tile, both ``[B or 1, 1, rows, columns]`` bool.

        Args:
            rows: indices of queries.
            columns: indices of keys.
            sink: ``[B, T]`` bool, from :meth:`sink`.
        """
        queries = torch.arange(rows.start, rows.stop, device=sink.device)
        keys = torch.arange(columns.start, columns.stop, device=sink.device)
        distance = queries[:, None] - keys
        visible = (distance >= 0)[None, None]
        if self.window is not None:
            visible = visible & (distance < self.window)
        if self.first is not None:
            visible = visible & (keys >= self.first[:, rows, None])[:, None]
        if self.key_valid is not None:
            visible = visible & self.key_valid[:, None, None, columns]
        protected = (distance < self.recent)[None, None] | sink[:, None, None, columns]
        if self.dense_until is not None:
            protected = protected | (queries < self.dense_until[:, None])[:, None, :, None]
        return visible, protected


def sink_mask(
    key_valid: Tensor | None,
    sinks: int,
    batch: int,
    length: int,
    device: torch.device,
    first: Tensor | None = None,
) -> Tensor:
    """Return ``[B, T]`` bool: True on the first ``sinks`` tokens of each row or document, padding not counted."""
    if key_valid is None and first is None:
        return (torch.arange(length, device=device) < sinks).expand(batch, length)
    valid = torch.ones(batch, length, dtype=torch.bool, device=device) if key_valid is None else key_valid
    token_index = valid.cumsum(1)
    if first is not None:
        token_index = token_index - (token_index - valid.long()).gather(1, first)
    return valid & (token_index <= sinks)
