"""Removal of tokens from rows in blocks; the last tokens of each row fill the holes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

from torch import Tensor

from ag.kernels.dispatch import VARIABLE, function, no_triton
from ag.kernels.kv_compact import cpu
from ag.kernels.kv_compact.reference import Worst as Worst
from ag.kernels.pages import WIDEST, Facts, Pages


def kv_compact(pages: Pages, keep: Tensor | Worst, records: Sequence[Tensor] = ()) -> None:
    """Drop tokens of rows and close the rows up, in place; ``pages.lengths`` counts what is left.

    The row's last tokens that stay fill the holes among its first slots, both in ascending order. No other token moves.
    Afterwards slots are in no order; ``pages.ranks`` has it.

    Args:
        pages: the rows; none of the blocks of a row that loses something is shared with another row.
        keep: ``[R, N]`` bool, the slots that stay, N at least the longest row; or :class:`Worst`, the scores by which
            tokens go.
        records: ``[R, C, S]`` float32 each, numbers of each token by slot, which move with the token. They are 0 on
            free slots, before and after.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    if isinstance(keep, Tensor) and not keep.numel():  # empty rows: the mask has no address
        return
    gaps = None if all(x.is_contiguous() for x in records) else "records are not contiguous"
    _version(pages.facts, gaps, os.environ.get(VARIABLE))(pages, keep, records)


@functools.cache
def _version(facts: Facts, gaps: str | None, forced: str | None) -> Callable[..., None]:
    versions = {
        "triton": no_triton(facts.device, facts.dtypes[0], facts.stored, WIDEST),
        "cpp": facts.gaps or gaps or cpu.KERNEL.unavailable(facts.device),
        "reference": None,
    }
    return function("kv_compact", versions, forced)
