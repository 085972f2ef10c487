"""The worst of the tokens that compete in each row, and how many there are."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.dispatch import pick
from ag.kernels.row_worst import cpu
from ag.kernels.row_worst.reference import Worst, reference_row_worst


def row_worst(score: Tensor, protected: Tensor, valid: Tensor) -> Worst:
    """Find the token that goes first from each row.

    Args:
        score: ``[B, Hkv, N]`` float32.
        protected: ``[B, Hkv, N]`` bool, tokens that do not compete.
        valid: ``[B, Hkv, N]`` bool, the slots that hold a token.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    version = pick("row_worst", {"cpp": cpu.unavailable(score), "reference": None})
    find = cpu.row_worst if version == "cpp" else reference_row_worst
    return find(score, protected, valid)
