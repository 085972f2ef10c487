"""Tokens that go leave their rows in blocks, and the last ones of each row fill the holes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from torch import Tensor

from ag.kernels.dispatch import VARIABLE, function, no_triton, remembered
from ag.kernels.kv_compact import cpu
from ag.kernels.kv_compact.reference import Worst as Worst
from ag.kernels.pages import WIDEST, Facts, Pages


def kv_compact(pages: Pages, keep: Tensor | Worst, records: Sequence[Tensor] = ()) -> None:
    """Drop tokens of rows and close the rows up, in place; ``pages.lengths`` counts what is left.

    The holes among the first slots of a row, in ascending order, take the row's last tokens that stay, in ascending
    order too. So nothing moves but what fills a hole, and slots have no order afterwards: ranks say it.

    Args:
        pages: the rows; none of the blocks of a row that loses something is shared with another row.
        keep: ``[R, N]`` bool, the slots that stay, N at least the longest row; or which tokens are the
            :class:`Worst`, which go.
        records: ``[R, C, S]`` float32 each, numbers of each token by slot, which move with it; on free slots they are
            0 before and after.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    if isinstance(keep, Tensor) and not keep.numel():  # rows hold nothing, and an empty mask has no address
        return
    gaps = None if all(x.is_contiguous() for x in records) else "records are not contiguous"
    _version(pages.facts, gaps, os.environ.get(VARIABLE))(pages, keep, records)


@remembered
def _version(facts: Facts, gaps: str | None, forced: str | None) -> Callable[..., None]:
    versions = {
        "triton": no_triton(facts.device, facts.dtypes[0], facts.stored, WIDEST),
        "cpp": facts.gaps or gaps or cpu.KERNEL.unavailable(facts.device),
        "reference": None,
    }
    return function("kv_compact", versions, forced)
