"""Tokens that go leave their rows in blocks, and the last ones of each row fill the holes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ag.kernels.dispatch import no_triton, pick
from ag.kernels.kv_compact import cpu
from ag.kernels.kv_compact.chunked import chunked_kv_compact
from ag.kernels.kv_compact.reference import Worst as Worst
from ag.kernels.kv_compact.reference import reference_kv_compact
from ag.kernels.pages import WIDEST, Pages


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
    version = pick(
        "kv_compact",
        {
            "triton": no_triton(pages.keys, pages.values, dtype=pages.dtypes[0], largest=WIDEST),
            "cpp": cpu.unavailable(pages, *records),
            "chunked": None,
            "reference": None,
        },
    )
    compact = {"cpp": cpu.kv_compact, "chunked": chunked_kv_compact}.get(version, reference_kv_compact)
    if version == "triton":
        from ag.kernels.kv_compact.triton import triton_kv_compact as compact
    compact(pages, keep, records)
