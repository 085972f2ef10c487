"""What the rows of a tile of attention say of each key, summed over the rows."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.dispatch import pick
from ag.kernels.row_statistics import cpu
from ag.kernels.row_statistics.reference import Kind, reference_row_statistics


def row_statistics(
    kind: Kind,
    logits: Tensor,
    counted: Tensor,
    value_norms: Tensor | None = None,
    dots: Tensor | None = None,
    output_norms: Tensor | None = None,
) -> Tensor:
    """Sum a statistic of ``A = softmax(s)`` over the rows of logits ``s`` that count.

    The kinds are ``attention``: ``A``; ``value``: ``A^2 ||v||^2``; ``key``: ``A^2 s^2 ||v - o||^2``; ``joint``:
    ``A^2 ||(1 + s) v - s o||^2``; for values v and outputs o of the attention (OBCache, Eq. 5 to 7).

    Args:
        kind: which statistic.
        logits: scaled ``[B, H, w, N]``, ``-inf`` where a row does not see the key; a row that sees nothing gives 0.
        counted: ``[B, w]`` bool.
        value_norms: ``||v||^2`` ``[B, Hkv, N]``, for all kinds but ``attention``.
        dots: ``<o, v>`` ``[B, H, w, N]``, for ``key`` and ``joint``.
        output_norms: ``||o||^2`` ``[B, H, w]``, for ``key`` and ``joint``.

    Returns:
        ``[B, H, N]`` in the type of the logits.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    compute = cpu.row_statistics if best_version(logits) == "cpp" else reference_row_statistics
    return compute(kind, logits, counted, value_norms, dots, output_norms)


def best_version(logits: Tensor) -> str:
    """Return the version that :func:`row_statistics` runs on such logits: ``cpp`` or ``reference``."""
    return pick("row_statistics", {"cpp": cpu.unavailable(logits), "reference": None})
