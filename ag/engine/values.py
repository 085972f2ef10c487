"""The values of the keys that a tile of attention meets, centred."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Values:
    """Values of keys, and what statistics read of each: computed once, for all tiles.

    A difference ``v_p - o_i`` does not change when the same vector is taken from all values. Its expansion in products
    does: their rounding errors grow with the distance of the values from the origin. So products use ``v - centre``.

    Attributes:
        v: values ``[B, Hkv, N, D]``, 0 on free slots.
        centre: mean of the values in use ``[B, Hkv, 1, D]``.
        centred: ``v - centre``, 0 on free slots.
        norms: ``||v||^2``, ``[B, Hkv, N]``.
        spread: ``||v - centre||^2``, ``[B, Hkv, N]``.
        along: ``<v, v - centre>``, ``[B, Hkv, N]``.
    """

    v: Tensor
    centre: Tensor
    centred: Tensor
    norms: Tensor
    spread: Tensor
    along: Tensor

    @classmethod
    def of(cls, v: Tensor, valid: Tensor | None = None) -> Values:
        """Centre values ``[B, Hkv, N, D]``, of which those that are ``valid`` ``[B, Hkv, N]`` bool are in use."""
        used = torch.ones_like(v[..., 0], dtype=torch.bool) if valid is None else valid
        v = v.masked_fill(~used[..., None], 0.0)
        centre = v.sum(2, keepdim=True) / used.sum(-1).clamp_min(1)[..., None, None]
        centred = (v - centre).masked_fill_(~used[..., None], 0.0)
        spread = centred.square().sum(-1)
        return cls(v, centre, centred, v.square().sum(-1), spread, spread + (centred @ centre.mT)[..., 0])

    def with_nothing(self) -> Values:
        """Return the same with one more value, 0, which the centre does not know."""
        zero, back = torch.zeros_like(self.centre), -self.centre
        none = torch.zeros_like(self.norms[..., :1])
        return Values(
            torch.cat([self.v, zero], 2),
            self.centre,
            torch.cat([self.centred, back], 2),
            torch.cat([self.norms, none], -1),
            torch.cat([self.spread, back.square().sum(-1)], -1),
            torch.cat([self.along, none], -1),
        )

    def part(self, heads: slice, keys: slice) -> Values:
        """Return the values of some KV heads and keys, as views."""
        return Values(
            self.v[:, heads, keys],
            self.centre[:, heads],
            self.centred[:, heads, keys],
            *(x[:, heads, keys] for x in (self.norms, self.spread, self.along)),
        )
