"""Close the gaps that evicted tokens leave in rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ag.kernels.dispatch import pick, recorded
from ag.kernels.row_close import cpu
from ag.kernels.row_close.reference import reference_row_close


def row_close(
    columns: Sequence[Tensor], keep: Tensor, starts: Tensor, lengths: Tensor, *, to_end: bool | None = None
) -> bool:
    """Move the kept tokens of each row together, in place and in their order.

    Row r fills the slots ``starts[r] : starts[r] + lengths[r]`` of flat buffers; rows do not overlap. Its kept tokens
    then begin where the row began, or end where it ended: the same for all rows. Other slots of a row hold anything.

    Args:
        columns: one to four buffers ``[S, ...]`` with something of each token, of any types.
        keep: ``[R, N]`` bool, which tokens stay; slot n of a row is ``starts[r] + n``, and those from its length on do
            not count. N is not below the longest row.
        starts: ``[R]`` long, on the device of the columns.
        lengths: ``[R]`` long, on the device of the columns.
        to_end: whether rows shall end where they ended; None: the side where fewer tokens have to move.

    Returns:
        Whether they do.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    version = pick("row_close", {"cpp": recorded(*columns) or cpu.unavailable(*columns), "reference": None})
    close = cpu.row_close if version == "cpp" else reference_row_close
    return close(columns, keep, starts, lengths, to_end=to_end)
