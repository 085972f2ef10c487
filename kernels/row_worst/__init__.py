"""The worst of the tokens that compete in each row, and how many there are."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.dispatch import no_triton, pick
from ag.kernels.row_worst import cpu
from ag.kernels.row_worst.reference import Worst, reference_row_worst


def row_worst(score: Tensor, protected: Tensor, valid: Tensor, ranks: Tensor | None = None) -> Worst:
    """Find the token that goes first from each row: of the lowest score, of equal ones the newest.

    Args:
        score: ``[B, Hkv, N]`` float32.
        protected: ``[B, Hkv, N]`` bool, tokens that do not compete.
        valid: ``[B, Hkv, N]`` bool, the slots that hold a token.
        ranks: ``[B, Hkv, N]`` int32 or long, which of two tokens is newer, 0 and more where one is held; None: the one
            in the higher slot.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    version = pick(
        "row_worst",
        {"triton": no_triton(score, largest=score.shape[-1]), "cpp": cpu.unavailable(score), "reference": None},
    )
    find = {"cpp": cpu.row_worst}.get(version, reference_row_worst)
    if version == "triton":
        from ag.kernels.row_worst.triton import triton_row_worst as find
    return find(score, protected, valid, ranks)
