"""What the softmax of some models has beside scaled products: capped logits (Gemma 2), and sink logits (gpt-oss)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Softmax(NamedTuple):
    """How logits become weights."""

    cap: float | None = None  # a logit s becomes cap * tanh(s / cap); None: it stays as it is
    #: ``[H]``, the sink logit of each query head, which takes part in each softmax beside the keys, and has no value;
    #: None: there are none.
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether it is the usual one."""
        return self.cap is None and self.sinks is None

    @property
    def bent(self) -> str | None:
        """Why a kernel cannot compute it that knows sink logits alone, or None."""
        return None if self.cap is None else "the model caps its logits"

    def capped(self, s: Tensor) -> Tensor:
        """Cap scaled logits."""
        return s if self.cap is None else torch.tanh(s / self.cap) * self.cap

    def by_head(self, ndim: int) -> Tensor | None:
        """Return the sink logits as logits ``[B, H, ..., N]`` of so many dimensions meet them: ``[1, H, ..., 1]``."""
        return None if self.sinks is None else self.sinks.view(1, -1, *[1] * (ndim - 2))

    def by_row(self, rows: int, group: int) -> Tensor | None:
        """Return those of each query head of each row, ``[R, G]`` float32: row ``b Hkv + h`` is KV head h of b."""
        if self.sinks is None:
            return None
        return self.sinks.float().repeat(rows * group // len(self.sinks)).view(rows, group).contiguous()

    def of_heads(self, heads: slice) -> Softmax:
        """Return that of some query heads."""
        return self if self.sinks is None else self._replace(sinks=self.sinks[heads])


PLAIN = Softmax()


def weigh(s: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of logits ``[..., N]`` beside sink logits ``[..., 1]`` that they broadcast with; no column.

    A row that sees nothing, all of it ``-inf``, gives 0 beside a sink, and no number without one.
    """
    if sinks is None:
        return s.softmax(-1)
    sinks = sinks.to(s.dtype).expand(*s.shape[:-1], 1)
    return torch.cat([s, sinks], -1).softmax(-1)[..., :-1]
