"""What the rows of a tile of attention say of each key, summed over the rows."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.dispatch import pick
from ag.kernels.row_statistics import cpu
from ag.kernels.row_statistics.reference import Kind, reference_row_statistics
from ag.kernels.row_statistics.values import Values as Values


def row_statistics(
    kind: Kind, logits: Tensor, counted: Tensor, values: Values | None = None, outputs: Tensor | None = None
) -> Tensor:
    """Sum a statistic of ``A = softmax(s)`` over the rows of logits ``s`` that count.

    The kinds are ``attention``: ``A``; ``value``: ``A^2 ||v||^2``; ``key``: ``A^2 s^2 ||v - o||^2``; ``joint``:
    ``A^2 ||(1 + s) v - s o||^2``; for values v and outputs ``o = A v`` (OBCache, Eq. 5 to 7). A difference ``v - o``
    is made without cancelling, so that in float32 a sum is off by roundings of what it is made of alone.

    Args:
        kind: which statistic.
        logits: scaled ``[B, H, w, N]``, ``-inf`` where a row does not see the key; a row that sees nothing gives 0.
        counted: ``[B, w]`` bool.
        values: values of the keys, for all kinds but ``attention``.
        outputs: ``o - centre`` ``[B, H, w, D]`` where they are known, which saves the C++ version time.

    Returns:
        ``[B, H, N]`` in the type of the logits.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    compute = cpu.row_statistics if best_version(logits) == "cpp" else reference_row_statistics
    return compute(kind, logits, counted, values, outputs)


def best_version(logits: Tensor) -> str:
    """Return the version that :func:`row_statistics` runs on such logits: ``cpp`` or ``reference``."""
    return pick("row_statistics", {"cpp": cpu.unavailable(logits), "reference": None})
