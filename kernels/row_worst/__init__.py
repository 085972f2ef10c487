"""The worst of the tokens that compete in each row, and how many there are."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.dispatch import no_triton, pick
from ag.kernels.row_worst import cpu
from ag.kernels.row_worst.reference import NOT_FINITE as NOT_FINITE
from ag.kernels.row_worst.reference import OVER as OVER
from ag.kernels.row_worst.reference import Going, Worst, reference_row_going, reference_row_worst


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
    version = _version(score)
    find = {"cpp": cpu.row_worst}.get(version, reference_row_worst)
    if version == "triton":
        from ag.kernels.row_worst.triton import triton_row_worst as find
    return find(score, protected, valid, ranks)


def row_going(
    score: Tensor, protected: Tensor, valid: Tensor, ranks: Tensor | None, capacity: Tensor, going: Going
) -> None:
    """Write down which token goes from each row that holds more than it may; the host learns nothing of it.

    The first four arguments are those of :func:`row_worst`. ``capacity`` ``[B]`` long are the tokens that a row may
    hold; it holds what is protected in any case. ``going`` is contiguous: it gets the slots anew, and what was found
    beside what was found before.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    version = _version(score)
    find = {"cpp": cpu.row_going}.get(version, reference_row_going)
    if version == "triton":
        from ag.kernels.row_worst.triton import triton_row_going as find
    find(score, protected, valid, ranks, capacity, going)


def _version(score: Tensor) -> str:
    return pick(
        "row_worst",
        {"triton": no_triton(score, largest=score.shape[-1]), "cpp": cpu.unavailable(score), "reference": None},
    )
