"""The tiles of the Triton kernels by type, head size and card.

Every entry was chosen by reading; none was measured on a card. Candidates were compiled for the card (Triton 3.9.0 with
its ptxas) as a call under flags needs them. Out went what spills registers and what takes more shared memory than a
block may. Of the others the first keeps most warps on a multiprocessor, by its registers and shared memory; of equals
it has the larger tile, which reads the other side of the product less often, then the more stages. The others of an
entry are what ``AG_TUNE=1`` times beside it (:class:`ag.kernels.tuned.Tuned`). Code for sm_80 and sm_89 is nearly
alike, but a block of sm_80 may take more shared memory.

Under other masks, or several at once, gated attention may keep up to 64 bytes of a thread on its stack. Float32 above a
head size of 128 has no tiles that spill nothing: those with the fewest bytes are taken, at most 0.2 KB and in
``_backward_keys`` 1 KB. Compiled by Triton 3.6, the first of every other entry spills at most 40 bytes.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch

Kind = Literal["16 bits", "16 bits above 128", "32 bits", "32 bits above 128", "codes", "codes above 128"]
Card = Literal[80, 89, 90]
SHARED: dict[Card, int] = {80: 163, 89: 99, 90: 227}  # KiB of shared memory that a block may take


class Tiles(NamedTuple):
    """A configuration.

    Attributes:
        rows: queries of a tile; tokens for ``_split`` and ``_attend``.
        warps: warps of a program, 32 threads each.
        stages: tiles that are loaded ahead, that at work included.
        keys: keys of a tile where the kernel chooses them, a multiple of :func:`ag.kernels.tuned.key_block`; else 0.
    """

    rows: int
    warps: int
    stages: int
    keys: int = 0


T = Tiles
Table = dict[Kind, dict[Card, list[Tiles]]]


def _alike(ampere: list[Tiles], hopper: list[Tiles]) -> dict[Card, list[Tiles]]:
    """Return an entry for sm_80 and sm_89, and another for sm_90."""
    return {80: ampere, 89: ampere, 90: hopper}


_ROWS: dict[Card, list[Tiles]] = _alike([T(32, 8, 1), T(16, 4, 1)], [T(32, 8, 1), T(16, 4, 1)])
_FEWEST: dict[Card, list[Tiles]] = _alike([T(16, 8, 1)], [T(16, 8, 1)])
_CODES: Table = {"codes": _alike([T(32, 8, 1)], [T(32, 8, 1)]), "codes above 128": _FEWEST}
_WIDE: dict[Card, list[Tiles]] = {
    80: [T(64, 8, 3), T(64, 8, 2)],
    89: [T(64, 8, 2), T(32, 4, 2)],
    90: [T(64, 8, 3), T(64, 8, 2), T(32, 4, 2)],
}

#: By the name of the kernel's function.
CONFIGURATIONS: dict[str, Table] = {
    "_forward": {
        "16 bits": _alike([T(128, 8, 3), T(128, 8, 2)], [T(128, 8, 3), T(128, 8, 2)]),
        "16 bits above 128": _WIDE,
        "32 bits": _ROWS,
        "32 bits above 128": _FEWEST,
    },
    "_backward_queries": {
        "16 bits": _alike([T(128, 8, 2), T(64, 8, 2)], [T(128, 8, 2)]),
        "16 bits above 128": {80: [T(64, 8, 2), T(32, 4, 2)], 89: [T(32, 4, 2)], 90: [T(32, 4, 2)]},
        "32 bits": _alike([T(16, 8, 1)], [T(16, 8, 1)]),
        "32 bits above 128": _FEWEST,
    },
    "_backward_keys": {
        "16 bits": _alike([T(32, 8, 2, 64)], [T(16, 8, 2, 128), T(32, 8, 2, 64)]),
        "16 bits above 128": {
            80: [T(32, 8, 2, 32), T(16, 8, 3, 32)],
            89: [T(16, 8, 1, 64), T(32, 8, 2, 32)],
            90: [T(16, 8, 3, 32), T(16, 4, 2, 32)],
        },
        "32 bits": _alike([T(32, 8, 1, 16), T(16, 8, 1, 16)], [T(32, 8, 1, 16)]),
        "32 bits above 128": _alike([T(16, 8, 1, 16)], [T(16, 8, 1, 16)]),
    },
    "_prefill": {
        "16 bits": _alike([T(128, 8, 3), T(64, 4, 2)], [T(128, 8, 3), T(128, 8, 2), T(64, 4, 2)]),
        "16 bits above 128": _WIDE,
        "32 bits": _ROWS,
        "32 bits above 128": _FEWEST,
    },
    "_row_sums": {
        "16 bits": _alike([T(128, 8, 3), T(64, 4, 2)], [T(128, 8, 3), T(64, 4, 2)]),
        "16 bits above 128": _alike([T(64, 8, 2), T(32, 4, 2)], [T(32, 4, 2), T(64, 8, 3)]),
        "32 bits": _ROWS,
        "32 bits above 128": _FEWEST,
    },
    "_columns": {
        "16 bits": _alike([T(128, 8, 2), T(128, 8, 3)], [T(128, 8, 3), T(64, 4, 2)]),
        "16 bits above 128": _alike([T(64, 8, 2), T(32, 4, 2)], [T(64, 8, 2), T(32, 4, 2)]),
        "32 bits": _alike([T(32, 4, 1), T(32, 8, 1)], [T(32, 4, 1), T(32, 8, 1)]),
        "32 bits above 128": _alike([T(32, 4, 1)], [T(32, 4, 1)]),
    },
    "_split": {
        "16 bits": _alike([T(64, 4, 2), T(128, 4, 2)], [T(64, 4, 2), T(64, 4, 3), T(128, 8, 3)]),
        "16 bits above 128": _alike([T(32, 4, 2), T(64, 4, 2)], [T(32, 4, 2), T(32, 4, 3), T(64, 8, 2)]),
        "32 bits": _alike([T(32, 4, 1), T(32, 8, 1)], [T(32, 4, 1), T(32, 8, 1)]),
        "32 bits above 128": _FEWEST,
        **_CODES,
    },
    "_attend": {
        "16 bits": _alike([T(64, 8, 3), T(64, 8, 2)], [T(32, 8, 2), T(64, 8, 3), T(64, 4, 3)]),
        "16 bits above 128": _alike([T(16, 8, 3), T(64, 8, 3)], [T(16, 8, 3), T(64, 8, 3)]),
        "32 bits": _alike([T(32, 8, 1), T(16, 8, 1)], [T(32, 8, 1), T(16, 8, 1)]),
        "32 bits above 128": _FEWEST,
        **_CODES,
    },
}


def of_type(dtype: torch.dtype, dim: int, *, codes: bool = False) -> Kind:
    """Return the kind of the table for a type, or codes of it, and the larger head size, of keys or values."""
    if codes:
        return "codes" if dim <= 128 else "codes above 128"
    if dtype.itemsize == 2:
        return "16 bits" if dim <= 128 else "16 bits above 128"
    return "32 bits" if dim <= 128 else "32 bits above 128"


@functools.cache
def of_card(device: torch.device) -> Card:
    """Return the card of the table whose tiles fit a device.

    Its blocks have as much shared memory or more: sm_87 as sm_80, sm_10x as sm_90, sm_86 and sm_12x as sm_89.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if 9 <= major <= 11:
        return 90
    return 80 if (major, minor) in ((8, 0), (8, 7)) else 89
