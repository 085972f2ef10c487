"""Attention to rows in pages in C++, which are read where they lie."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.pages import Pages
from ag.kernels.softmax import PLAIN, Softmax

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def paged_attention(
    q: Tensor,
    pages: Pages,
    ranks: Tensor | None,
    scaling: float,
    window: int | None = None,
    recent: int | None = None,
    softmax: Softmax = PLAIN,
    weigh: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Do what :func:`ag.kernels.paged_attention.paged_attention` does, on the CPU."""
    (batch, heads, count, _), (rows, most) = q.shape, pages.table.shape
    group, slots = batch * heads // rows, most * pages.keys.shape[1]
    out = torch.empty(batch, heads, count, pages.channels[1])
    weights = torch.empty(batch, heads, slots) if weigh else None
    if not pages.lengths.is_contiguous():
        pages = pages._replace(lengths=pages.lengths.contiguous())
    KERNEL(
        *(pages.native, q.float().contiguous() * scaling, None if recent is None else pages.gate),
        *(None if ranks is None else ranks.contiguous(), rows // batch, group, count, window or 0, recent or 0, slots),
        *(torch.get_num_threads(), None if softmax.cap is None else torch.tensor([softmax.cap])),
        *(softmax.by_row(rows, group), out, weights),
    )
    return out.to(q.dtype), weights


def unavailable(pages: Pages) -> str | None:
    """Return why the C++ version cannot run on such rows, or None."""
    keys, values = pages.dtypes
    if keys not in native.TYPES or values != keys:
        return f"keys of {keys} and values of {values} are not both float32, bfloat16 or float16"
    return KERNEL.unavailable(*pages.columns, in_place=True)
