"""The boundary of the logits that keeps a share of the tokens, from a table measured in validation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ag.errors import UserError

SHARES = tuple(step / 20 for step in range(1, 20))  # 0.05 to 0.95


@dataclass(frozen=True)
class Calibration:
    """A table of shares of the tokens, over all layers and KV heads, and the boundary of the logits for each share.

    Attributes:
        shares: rising, between 0 and 1, at least two.
        boundaries: for each share, the logit above which this share of the tokens lies; falling.

    Raises:
        ValueError: for other numbers.
    """

    shares: Sequence[float]
    boundaries: Sequence[float]

    def __post_init__(self) -> None:
        rising = len(self.shares) > 1 and all(a < b for a, b in pairwise((0, *self.shares, 1)))
        if not rising or len(self.shares) != len(self.boundaries):
            raise ValueError(
                f"calibration.shares={list(self.shares)!r:.80}: expected rising numbers between 0 and 1, at least two, "
                f"and a boundary for each (there are {len(self.boundaries)} boundaries)."
            )
        falling = all(a >= b for a, b in pairwise(self.boundaries))
        if not falling or not all(map(math.isfinite, self.boundaries)):
            raise ValueError(f"calibration.boundaries={list(self.boundaries)!r:.80}: expected falling finite numbers.")

    def record(self) -> Mapping[str, list[float]]:
        """Return the table in the form of JSON."""
        return {"shares": list(self.shares), "boundaries": list(self.boundaries)}

    def boundary(self, share: float) -> float:
        """Return the logit above which a share of the tokens lies; the table is interpolated linearly.

        Raises:
            UserError: for a share outside of the table.
        """
        low, high = self.shares[0], self.shares[-1]
        if not low <= share <= high:
            raise UserError(f"share={share}: expected one from {low} to {high}, which were measured after training.")
        return float(np.interp(share, self.shares, self.boundaries))
