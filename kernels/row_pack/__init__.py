"""What a scorer recorded of each token, without the tokens that go."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.dispatch import pick, recorded
from ag.kernels.row_pack import cpu
from ag.kernels.row_pack.reference import reference_row_pack


def row_pack(x: Tensor, keep: Tensor, longest: int) -> Tensor:
    """Copy what stays of a record of tokens, without gaps.

    Args:
        x: ``[B, H, ..., N]`` of any type, H a multiple of Hkv.
        keep: ``[B, Hkv, N]`` bool, which tokens stay.
        longest: tokens to copy of a head at most, N': those that stay, or the first of them.

    Returns:
        ``[B, H, ..., N']``; the ends of heads that keep fewer are 0.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    version = pick("row_pack", {"cpp": recorded(x) or cpu.unavailable(x), "reference": None})
    pack = cpu.row_pack if version == "cpp" else reference_row_pack
    return pack(x, keep, longest)
