"""A scorer whose scores are drawn: of any sign, the same for every model, and too far apart for rounding to matter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from ag.engine.scorer_inputs import Needs, ScorerInputs
from ag.engine.scorers import SCORERS
from ag.engine.scorers.base import Scorer

RANKS = 64


@cache
def numbers(seed: int, layer: int, heads: int) -> tuple[Tensor, Tensor]:
    """Numbers from 0 to 63 ``[Hkv, 64]``, no two of a head alike, and one number ``[Hkv, 1]`` for each head."""
    make = torch.Generator().manual_seed(1000 * seed + layer)
    places = torch.stack([torch.randperm(RANKS, generator=make) for _ in range(heads)])
    return places, torch.randint(0, RANKS, (heads, 1), generator=make)


@dataclass(frozen=True, kw_only=True)
class Drawn(Scorer):
    """Multiples of 1/16 between -4 and 4, at another height in each head.

    Attributes:
        seed: of what is drawn.
        lowered: a layer all of whose scores are 16 lower; None means no layer.
    """

    seed: int = 0
    lowered: int | None = None
    needs = Needs(key_indices=True)

    def score(self, inputs: ScorerInputs) -> Tensor:
        """Return the number drawn for the token index of each token."""
        batch, heads, _ = inputs.key_indices.shape
        places, height = numbers(self.seed, inputs.layer, heads)
        scores = (places - height).expand(batch, -1, -1).gather(2, inputs.key_indices.clamp(0, RANKS - 1)) / 16
        return scores - 16.0 * (inputs.layer == self.lowered)


@contextmanager
def registered() -> Iterator[None]:
    """Let policies name it, as ``drawn``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCORERS, "drawn", Drawn)
        yield
