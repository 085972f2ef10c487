"""Removal of tokens from rows in blocks; the last tokens of each row fill the holes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

from torch import Tensor

from ag.kernels.dispatch import VARIABLE, Versions, function, no_triton
from ag.kernels.kv_compact import cpu
from ag.kernels.pages import WIDEST, Facts, Pages


def kv_compact(
    pages: Pages, score: Tensor, keep_count: Tensor, records: Sequence[Tensor] = (), nonfinite: Tensor | None = None
) -> None:
    """Keep ``keep_count`` tokens of each row and evict its other tokens, in place; ``pages.lengths`` is updated.

    The tokens with the highest scores are kept, of equal scores the older token, and tokens of +inf even beyond
    ``keep_count``. The last kept tokens of a row fill the free slots before them, both in ascending order; no other
    token moves. Slots have no order afterwards: ``pages.token_indices`` has each token's index.

    Args:
        pages: the rows. A row must not share blocks with another row if its tokens are evicted.
        score: ``[B, Hkv or 1, S]`` float32 by slot, S at least the longest row; see
            :func:`ag.retention.eviction_score`.
        keep_count: ``[R]`` int32, tokens to keep; a shorter row does not change.
        records: ``[R, C, S]`` float32 each, contiguous: values by slot that move with their tokens. They are 0 on free
            slots, before and after.
        nonfinite: R elements int32, set to 1 for a row that is evicted from and has a score of NaN. None: not recorded.

    Raises:
        UserError: AG_KERNELS names a version that cannot run here.
    """
    nonfinite = None if nonfinite is None else nonfinite.view(-1)
    gaps = None if all(x.is_contiguous() for x in records) else "records are not contiguous"
    _version(pages.facts, gaps, os.environ.get(VARIABLE))(pages, score, keep_count, records, nonfinite)


@functools.cache
def _version(facts: Facts, gaps: str | None, forced: str | None) -> Callable[..., None]:
    versions: Versions = {
        "triton": no_triton(facts.device, facts.dtypes[0], facts.stored, WIDEST),
        "cpp": lambda: facts.gaps or gaps or cpu.KERNEL.unavailable(facts.device),
        "reference": None,
    }
    return function("kv_compact", versions, forced)
