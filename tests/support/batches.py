"""Rows of random tokens, batches of them, and what a cache holds."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import ag


def row(length: int, seed: int | None = None) -> Tensor:
    """Tokens ``[T]``, which follow from the length unless a seed is given."""
    generator = torch.Generator().manual_seed(length if seed is None else seed)
    return torch.randint(3, 128, (length,), generator=generator)


def padded(rows: Sequence[Tensor], side: str = "left") -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` of rows padded on a side, or with ``any`` in columns that are drawn."""
    width, draw = max(map(len, rows)), random.Random(sum(map(len, rows)))
    width += 3 * (side == "any" and width > 1)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for b, tokens in enumerate(rows):
        n = len(tokens)
        first = {"left": width - n, "right": 0}
        places = sorted(draw.sample(range(width), n)) if side == "any" else range(first[side], first[side] + n)
        ids[b, [*places]], mask[b, [*places]] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask}


def positions(mask: Tensor, last: int) -> Tensor:
    """The positions of the last columns of a mask."""
    return (mask.cumsum(1) - 1).clamp_min(0)[:, -last:]


@torch.no_grad()
def read(model: Any, ids: Tensor, *policy: Any, **options: Any) -> ag.EvictionCache:
    """A cache that has read a row of tokens ``[T]``, or several ``[B, T]``."""
    cache = ag.EvictionCache(model, *policy, **options)
    model(ids if ids.dim() == 2 else ids[None], past_key_values=cache)
    return cache


@torch.no_grad()
def step(model: Any, cache: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits of a pass over the last columns of a batch, whose mask has all columns."""
    at = positions(mask, ids.shape[1])
    logits: Tensor = model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits
    return logits


def columns(cache: Any) -> list[list[list[list[int]]]]:
    """The tokens that are held, by layer, sequence and head."""
    layers = range(len(cache.state.layers))
    return [[[head.tolist() for head in heads] for heads in cache.kept_positions(i)] for i in layers]
