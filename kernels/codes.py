"""Quantisation of keys and values to 8 bits.

Each group of channels of a token has its own scale and offset: a token is quantised once, when it is appended. KIVI
(Liu et al. 2024) shares the scale of a key's channel among consecutive tokens, but eviction does not keep their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

KVDtype = Literal["float", "int8"]

GROUP = 64  # adjacent channels of a token that share a scale and an offset
STEPS = 255  # between the smallest and the largest number of a group
LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Codes:
    """The 8-bit codes of ``width`` numbers, in groups with a scale and an offset.

    A number is ``offset + scale * code``. The offset is the group's smallest number, and the scale its range divided by
    STEPS; both are float16, and larger numbers are clamped to its range. If a number is not finite, its group becomes
    NaN, and an overflow of the model shows.

    Attributes:
        width: numbers of a token.
        dtype: type of the numbers.
    """

    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of a token, with its scales and offsets."""
        return self.width + 4 * self._groups

    @property
    def _groups(self) -> int:
        return -(-self.width // GROUP)

    def encode(self, x: Tensor) -> Tensor:
        """Return the bytes ``[..., nbytes]`` uint8 of numbers ``[..., width]``: codes, then scales and offsets."""
        x = x.float()
        x = x.clamp(-LARGEST, LARGEST).where(x.isfinite(), torch.nan)
        spare = self._groups * GROUP - self.width
        padded = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], spare)], -1)
        groups = padded.unflatten(-1, (self._groups, GROUP))
        lowest, highest = groups.amin(-1), groups.amax(-1)
        offset = (lowest + 0.0).half()  # -0.0 becomes 0.0, as in C++
        scale = ((highest - offset.float()) / STEPS + 0.0).half()
        step = scale.float()
        per_step = torch.where(step > 0, 1 / step, 0.0)
        codes = (groups - offset.float()[..., None]) * per_step[..., None]
        codes = codes.round().clamp(0, STEPS).to(torch.uint8).flatten(-2)[..., : self.width]
        pairs = torch.stack([scale, offset], -1).flatten(-2)
        pairs = pairs.masked_fill(pairs.isnan(), torch.nan)  # the NaN whose bytes C++ writes
        return torch.cat([codes, pairs.contiguous().view(torch.uint8)], -1)

    def decode(self, data: Tensor) -> Tensor:
        """Return the numbers ``[..., width]`` of bytes ``[..., nbytes]``."""
        codes, pairs = data.split([self.width, 4 * self._groups], -1)
        scale, offset = (
            pairs.clone(memory_format=torch.contiguous_format)
            .view(torch.float16)
            .float()
            .unflatten(-1, (-1, 2))
            .unbind(-1)
        )
        scale, offset = (y.repeat_interleave(GROUP, -1)[..., : self.width] for y in (scale, offset))
        decoded: Tensor = (codes.float() * scale + offset).to(self.dtype)
        return decoded


class Format(NamedTuple):
    """The codes of the keys and values of a pool."""

    keys: Codes
    values: Codes

    @classmethod
    def of(cls, kind: KVDtype, keys: Tensor, values: Tensor) -> Format | None:
        """Return the format of keys and values like these ``[..., D]``. None: they are not quantised."""
        if kind == "float":
            return None
        return cls(Codes(keys.shape[-1], keys.dtype), Codes(values.shape[-1], values.dtype))
