"""Keys and values in fewer bits: how the numbers of a token become codes, and codes numbers again.

Each group of channels of a token has a scale and an offset of its own, so that a token is written when it comes and
never again. KIVI (Liu et al. 2024) gives a key's channels scales that many tokens share, which calls for tokens to be
gathered first, in an order that eviction does not keep; small groups of channels do the same work here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

KVDtype = Literal["float", "int8"]

GROUP = 64  # channels of a token, side by side, that share a scale and an offset
STEPS = 255  # between the least and the largest number of a group
LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Codes:
    """How ``width`` numbers are written: a code of 8 bits for each, in groups with a scale and an offset each.

    A number is ``offset + scale code``. The offset is the group's least number and the scale its range over the number
    of steps, both float16; what lies beyond that type becomes its largest number. A group with a number that is not
    finite becomes NaN, so that a model that overflows is noticed.

    Attributes:
        width: numbers of a token.
        dtype: of the numbers that codes are made of, and become again.
    """

    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of a token, scales and offsets among them."""
        return self.width + 4 * self._groups

    @property
    def _groups(self) -> int:
        return -(-self.width // GROUP)

    def encode(self, x: Tensor) -> Tensor:
        """Return the bytes ``[..., nbytes]`` uint8 of numbers ``[..., width]``: codes, then scales and offsets."""
        x = x.float()
        x = x.clamp(-LARGEST, LARGEST).where(x.isfinite(), torch.nan)
        spare = self._groups * GROUP - self.width
        whole = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], spare)], -1)
        groups = whole.unflatten(-1, (self._groups, GROUP))
        least, most = groups.amin(-1), groups.amax(-1)
        offset = (least + 0.0).half()  # -0.0 becomes 0.0, here and there
        scale = ((most - offset.float()) / STEPS + 0.0).half()
        step = scale.float()
        per_step = torch.where(step > 0, 1 / step, 0.0)
        codes = (groups - offset.float()[..., None]) * per_step[..., None]
        codes = codes.round().clamp(0, STEPS).to(torch.uint8).flatten(-2)[..., : self.width]
        pairs = torch.stack([scale, offset], -1).flatten(-2)
        pairs = pairs.masked_fill(pairs.isnan(), torch.nan)  # of NaNs the one whose bytes C++ writes
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
    """How the keys and values of a pool are written."""

    keys: Codes
    values: Codes

    @classmethod
    def of(cls, kind: KVDtype, keys: Tensor, values: Tensor) -> Format | None:
        """Return the format of keys and values like these ``[..., D]``; None: they lie there as they came."""
        if kind == "float":
            return None
        return cls(Codes(keys.shape[-1], keys.dtype), Codes(values.shape[-1], values.dtype))
