"""Attention from several new tokens to rows in pages in C++, which are read where they lie."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.paged_decode import cpu as paged_decode
from ag.kernels.pages import Pages
from ag.kernels.pages import native as native_pages
from ag.kernels.softmax import PLAIN, Softmax

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def paged_attend(
    q: Tensor,
    pages: Pages,
    ranks: Tensor,
    scaling: float,
    window: int | None = None,
    recent: int | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Do what :func:`ag.kernels.paged_attend.paged_attend` does, on the CPU."""
    (batch, heads, count, _), rows = q.shape, len(pages.table)
    out = torch.empty(batch, heads, count, pages.channels[1])
    pages = pages._replace(lengths=pages.lengths.contiguous())
    KERNEL(
        *(native_pages(pages), q.float().contiguous() * scaling, None if recent is None else pages.gate),
        *(ranks.int().contiguous(), rows // batch, batch * heads // rows, count, window or 0, recent or 0),
        *(torch.get_num_threads(), *paged_decode.native_softmax(softmax, rows, batch * heads // rows), out),
    )
    return out.to(q.dtype)


def unavailable(pages: Pages) -> str | None:
    """Return why the C++ version cannot run on such rows, or None."""
    return paged_decode.unavailable(pages, kernel=KERNEL)
