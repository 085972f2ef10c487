"""Variants of the softmax of attention: capped logits (Gemma 2) and sink logits (gpt-oss)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Softmax(NamedTuple):
    """The softmax of a model's attention."""

    cap: float | None = None  # a logit s becomes cap * tanh(s / cap); None means that logits are not capped
    #: ``[H]``, a logit of each query head that takes part in each softmax and has no value. None: the model has no sink
    #: logits.
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether logits are not capped and there are no sink logits."""
        return self.cap is None and self.sinks is None

    @property
    def bent(self) -> str | None:
        """Why a kernel that cannot cap logits does not support this softmax. None: logits are not capped."""
        return None if self.cap is None else "the model caps its logits"

    def capped(self, s: Tensor) -> Tensor:
        """Cap scaled logits."""
        return s if self.cap is None else torch.tanh(s / self.cap) * self.cap

    def by_head(self, ndim: int) -> Tensor | None:
        """Return the sink logits as ``[1, H, 1, ..., 1]`` of ``ndim`` dimensions."""
        return None if self.sinks is None else self.sinks.view(1, -1, *[1] * (ndim - 2))

    def by_row(self, rows: int, group: int) -> Tensor | None:
        """Return the sink logits of each row, ``[R, G]`` float32; row ``b Hkv + h`` is KV head h of sequence b."""
        if self.sinks is None:
            return None
        return self.sinks.float().repeat(rows * group // len(self.sinks)).view(rows, group).contiguous()

    def of_heads(self, heads: slice) -> Softmax:
        """Return the softmax for some of the query heads."""
        return self if self.sinks is None else self._replace(sinks=self.sinks[heads])


PLAIN = Softmax()


def weigh(s: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax ``[..., N]`` of logits ``[..., N]`` and sink logits, which broadcast to ``[..., 1]``.

    A row with only ``-inf`` gives 0 with a sink logit and NaN without a sink logit.
    """
    if sinks is None:
        return s.softmax(-1)
    sinks = sinks.to(s.dtype).expand(*s.shape[:-1], 1)
    return torch.cat([s, sinks], -1).softmax(-1)[..., :-1]
