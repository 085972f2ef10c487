"""Cuts the next tokens of a batch of sequences into parts; each part is read in a pass of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

#: The first token index and the end ``[B]`` of a part in each sequence, and whether it belongs to the prompts.
Part = tuple[Tensor, Tensor, bool]


def cut(first: Tensor, last: Tensor, *sizes: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parts of the token indices from ``first`` to ``last`` ``[B]``, cut at the multiples of the sizes."""
    low, high = int(first.min()), int(last.max())
    cuts = {cut for size in sizes if size for cut in range((low // size + 1) * size, high, size)}
    for cut in [*sorted(cuts), high]:
        end = last.clamp_max(cut).maximum(first)
        if bool((end > first).any()):
            yield first, end
        first = end


def in_turn(parts: Iterable[Part], goes_on: bool | None) -> Iterator[Part]:
    """Cut parts for layers that keep states, which read the columns of a pass in turn.

    Each pass takes equally many tokens from every sequence, except from sequences that begin: padding before a text
    leaves their states empty.

    Args:
        parts: the parts.
        goes_on: whether these layers go on from their states in a pass of several tokens, else sequences that have
            states are read token by token; None means that no layer keeps states.
    """
    for first, end, is_prefill in parts:
        count = end - first
        if goes_on is None or not bool(count.any()):
            yield first, end, is_prefill
            continue
        for since, until in _passes(count, first == 0, goes_on):
            if bool((until > since).any()):
                yield first + since, first + until, is_prefill


def _passes(count: Tensor, empty: Tensor, goes_on: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield from where to where ``[B]`` each pass reads ``count`` tokens ``[B]``; some states may be empty ``[B]``."""
    none = torch.zeros_like(count)
    if not goes_on:
        yield none, count.where(empty, none)
        for number in range(int(count.max())):
            in_group = ~empty & (count > number)
            yield (none + number).where(in_group, none), (none + number + 1).where(in_group, none)
        return
    fewer = 0  # tokens that have been read of each sequence that has no more
    for width in count[~empty].unique().tolist():
        in_group = torch.where(empty, (count > fewer) & (count <= width), count == width)
        yield none, count.where(in_group, none)
        fewer = width
    yield none, count.where(empty & (count > fewer), none)
