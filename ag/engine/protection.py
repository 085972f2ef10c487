"""Tokens that the caller protects, by spans of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ag.errors import UserError


def marked(spans: Sequence[Any]) -> Tensor:
    """Return ``[L]`` bool, which own tokens lie in spans ``(first, behind the last)``.

    Raises:
        UserError: for a span that is none.
    """
    for span in spans:
        whole = len(span) == 2 and all(isinstance(x, int) for x in span) if isinstance(span, tuple) else False
        if not whole or not 0 <= span[0] < span[1]:
            raise UserError(
                f"protect: {span!r}: expected pairs (first token, the one behind the last), such as (0, 40), or for "
                "each sequence a list of such pairs."
            )
    marks = torch.zeros(max((behind for _, behind in spans), default=0), dtype=torch.bool)
    for first, behind in spans:
        marks[first:behind] = True
    return marks


def of_each(marks: Tensor, count: int) -> Tensor:
    """Return the marks ``[B, L]`` of ``count`` sequences: each prompt's for its beams, or one prompt's for all."""
    if count % len(marks):
        raise UserError(f"protect: spans for {len(marks)} sequences: expected one list of spans, or {count} lists.")
    return marks.repeat_interleave(count // len(marks), 0)
