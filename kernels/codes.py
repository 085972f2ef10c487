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
from torch.nn import functional as F

KVDtype = Literal["float", "int8", "int4"]

CODES = 32  # channels of 4 bits whose codes share bytes: those of the first half are the low bits
SINKS = 1  # first tokens of a text that stay as they came where codes have 4 bits
RECENT = 8  # newest tokens that do, too
LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Codes:
    """How ``width`` numbers are written: a code of so many bits for each, in groups with a scale and an offset each.

    A number is ``offset + scale code``. The offset is the group's least number and the scale its range over the number
    of steps, both float16; what lies beyond that type becomes its largest number. A group with a number that is not
    finite becomes NaN, so that a model that overflows is noticed.

    Attributes:
        bits: 8 or 4.
        width: numbers of a token.
        group: of how many of them, side by side, one scale is.
        dtype: of the numbers that codes are made of, and become again.
    """

    bits: Literal[8, 4]
    width: int
    group: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of a token, scales and offsets among them."""
        return self.code_bytes + 4 * self._groups

    @property
    def code_bytes(self) -> int:
        """Bytes of a token's codes alone."""
        return -(-self.width * self.bits // 8)

    @property
    def _groups(self) -> int:
        return -(-self.width // self.group)

    def encode(self, x: Tensor) -> Tensor:
        """Return the bytes ``[..., nbytes]`` uint8 of numbers ``[..., width]``: codes, then scales and offsets."""
        x = x.float()
        x = x.clamp(-LARGEST, LARGEST).where(x.isfinite(), torch.nan)
        spare = self._groups * self.group - self.width
        whole = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], spare)], -1)
        groups = whole.unflatten(-1, (self._groups, self.group))
        least, most = groups.amin(-1), groups.amax(-1)
        offset = (least + 0.0).half()  # -0.0 becomes 0.0, here and there
        scale = ((most - offset.float()) / (2**self.bits - 1) + 0.0).half()
        step = scale.float()
        per_step = torch.where(step > 0, 1 / step, 0.0)
        codes = (groups - offset.float()[..., None]) * per_step[..., None]
        codes = codes.round().clamp(0, 2**self.bits - 1).to(torch.uint8).flatten(-2)[..., : self.width]
        pairs = torch.stack([scale, offset], -1).flatten(-2)
        pairs = pairs.masked_fill(pairs.isnan(), torch.nan)  # of NaNs the one whose bytes C++ writes
        return torch.cat([codes if self.bits == 8 else _packed(codes), pairs.contiguous().view(torch.uint8)], -1)

    def decode(self, data: Tensor) -> Tensor:
        """Return the numbers ``[..., width]`` of bytes ``[..., nbytes]``."""
        codes, pairs = data.split([self.code_bytes, 4 * self._groups], -1)
        scale, offset = (
            pairs.clone(memory_format=torch.contiguous_format)
            .view(torch.float16)
            .float()
            .unflatten(-1, (-1, 2))
            .unbind(-1)
        )
        numbers = (codes if self.bits == 8 else _unpacked(codes, self.width)).float()
        scale, offset = (y.repeat_interleave(self.group, -1)[..., : self.width] for y in (scale, offset))
        decoded: Tensor = (numbers * scale + offset).to(self.dtype)
        return decoded


def _packed(codes: Tensor) -> Tensor:
    """Return two codes of 4 bits in each byte: of CODES channels, fewer at the end, the first half are the low bits."""
    parts = []
    for part in codes.split(CODES, -1):
        low, high = part.split([half := (part.shape[-1] + 1) // 2, part.shape[-1] - half], -1)
        parts.append(low | F.pad(high, (0, half - high.shape[-1])) << 4)
    return torch.cat(parts, -1)


def _unpacked(data: Tensor, width: int) -> Tensor:
    parts = [torch.cat([part & 15, part >> 4], -1) for part in data.split(CODES // 2, -1)]
    return torch.cat(parts, -1)[..., :width]


class Format(NamedTuple):
    """How the keys and values of a pool are written."""

    keys: Codes
    values: Codes
    near: bool  # whether the newest and first tokens stay beside their codes as they came

    @classmethod
    def of(cls, kind: KVDtype, keys: Tensor, values: Tensor) -> Format | None:
        """Return the format of keys and values like these ``[..., D]``; None: they lie there as they came."""
        if kind == "float":
            return None
        bits: Literal[8, 4] = 8 if kind == "int8" else 4
        of_keys = Codes(bits, keys.shape[-1], 64 if bits == 8 else 32, keys.dtype)
        return cls(of_keys, Codes(bits, values.shape[-1], 64, values.dtype), near=bits == 4)


class Near(NamedTuple):
    """The newest tokens of R rows, and their first ones, as they came; what lies in the pages of them is not read."""

    keys: Tensor  # [R, N, D]
    values: Tensor  # [R, N, Dv]
    ranks: Tensor  # [R, N] int32, by :func:`near_places`; below 0: nothing

    def add(self, keys: Tensor, values: Tensor, ranks: Tensor, there: Tensor | None) -> None:
        """Take those of tokens ``[R, T, ...]`` of ``ranks`` ``[R, T]`` that are ``there`` and near; None: all are."""
        count, there = self.ranks.shape[1], torch.ones_like(ranks, dtype=torch.bool) if there is None else there
        newest = ranks.masked_fill(~there, -1).amax(1, keepdim=True)
        rows, tokens = (there & ((ranks > newest - (count - SINKS)) | (ranks < SINKS))).nonzero(as_tuple=True)
        places = near_places(ranks[rows, tokens], count).long()
        for column, x in zip(self, (keys, values, ranks.int()), strict=True):
            column[rows, places] = x[rows, tokens]


def resized(near: Near, count: int) -> Near:
    """Return room for ``count`` near tokens of the same rows, with those that are near then."""
    rows, _, *_ = near.ranks.shape
    keys, values = (x.new_zeros(rows, count, x.shape[2]) for x in near[:2])
    new = Near(keys, values, near.ranks.new_full((rows, count), -1))
    new.add(*near, there=near.ranks >= 0)
    return new


def near_places(ranks: Tensor, count: int) -> Tensor:
    """Return where among ``count`` near tokens those of ``ranks`` lie: first ones stay, others take turns."""
    return torch.where(ranks < SINKS, ranks, SINKS + (ranks - SINKS) % (count - SINKS))
