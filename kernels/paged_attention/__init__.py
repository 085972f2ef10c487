"""Attention from new tokens to rows of keys and values in pages."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

from ag.kernels.dispatch import VARIABLE, Versions, function, no_triton
from ag.kernels.native import TYPES
from ag.kernels.paged_attention import cpu
from ag.kernels.pages import Facts, Pages
from ag.kernels.softmax import PLAIN, Softmax


def paged_attention(
    q: Tensor,
    pages: Pages,
    query_indices: Tensor | None,
    scaling: float,
    window: int | None = None,
    recent: int | None = None,
    softmax: Softmax = PLAIN,
    weigh: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from each query to the tokens of its row up to its own token; no row is gathered.

    The host reads no length: work is divided by the width of the table.

    Args:
        q: ``[B, H, T, D]``; query head h reads KV head h // (H / Hkv).
        pages: the rows, which contain the tokens of the queries; with ``recent`` their gate column is bool, True for
            open.
        query_indices: ``[B, T]`` long, token index of each query; a query of a negative index sees nothing. None: each
            query sees all tokens of its row, as the newest token does; then ``window`` and ``recent`` are None too.
        scaling: factor of the logits.
        window: a query sees tokens at a smaller distance than this. None: no sliding window.
        recent: newest tokens that a query sees even if their gates are closed, its own included. None: gates have no
            effect.
        softmax: cap and sink logits of the model.
        weigh: also return the attention weights of a single query (T is 1), without reading keys again.

    Returns:
        ``[B, H, T, Dv]``, with softmax and sums in float32 (float64 for float64 arguments), 0 for a query that sees
        nothing. Then the weights ``[B, H, S]`` float32 by slot of the row, where S is the number of slots of the table,
        0 for tokens that the query does not see; None without ``weigh``.

    Raises:
        UserError: AG_KERNELS names a version that cannot run here.
        ValueError: ``weigh`` with several queries.
    """
    if weigh and q.shape[2] != 1:
        raise ValueError(f"weigh=True with {q.shape[2]} queries: expected one")
    attend = _version(pages.facts, q.dtype, os.environ.get(VARIABLE))
    return attend(q, pages, query_indices, scaling, window, recent, softmax, weigh)


@functools.cache
def _version(facts: Facts, dtype: torch.dtype, forced: str | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    keys, values = facts.dtypes
    mixed = "queries, keys and values differ in type" if (keys, values) != (dtype, dtype) else None
    if facts.coded and any(channels % 2 for channels in facts.channels):
        mixed = mixed or "codes of a token take an odd number of bytes"
    wide = None
    if keys not in TYPES or values != keys:
        wide = f"keys of {keys} and values of {values} are not both float32, bfloat16 or float16"
    versions: Versions = {
        "triton": mixed or no_triton(facts.device, dtype, max(facts.channels)),
        "cpp": lambda: wide or facts.gaps or cpu.KERNEL.unavailable(facts.device),
        "reference": None,
    }
    return function("paged_attention", versions, forced)
