"""Decoding over rows in pages in C++: as fast as memory can be read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ag.kernels import native
from ag.kernels.pages import Pages
from ag.kernels.pages import native as native_pages
from ag.kernels.softmax import PLAIN, Softmax

KERNEL = native.Kernel(Path(__file__).with_name("cpu.cpp"))


def paged_decode(
    q: Tensor, pages: Pages, scaling: float, weights: Tensor | None = None, softmax: Softmax = PLAIN
) -> Tensor:
    """Compute :func:`ag.kernels.paged_decode.paged_decode` on the CPU in one pass over what is held."""
    batch, heads, _, _ = q.shape
    rows, most = pages.table.shape
    out = torch.empty(batch, heads, 1, pages.channels[1])
    pages = pages._replace(lengths=pages.lengths.contiguous())
    KERNEL(
        *(native_pages(pages), q.float().contiguous() * scaling, batch * heads // rows),
        *(most * pages.keys.shape[1], torch.get_num_threads(), *native_softmax(softmax, rows, batch * heads // rows)),
        *(out, weights),
    )
    return out.to(q.dtype)


def native_softmax(softmax: Softmax, rows: int, group: int) -> tuple[Tensor | None, Tensor | None]:
    """Return a cap ``[1]`` and sink logits ``[R, G]`` in float32, as kernels take them; None: there are none."""
    return None if softmax.cap is None else torch.tensor([softmax.cap]), softmax.by_row(rows, group)


def unavailable(pages: Pages, *others: Tensor, kernel: native.Kernel = KERNEL) -> str | None:
    """Return why a C++ kernel cannot run on such rows, or None."""
    keys, values = pages.dtypes
    if keys not in native.TYPES or values != keys:
        return f"keys of {keys} and values of {values} are not both float32, bfloat16 or float16"
    return kernel.unavailable(*pages.columns, *others, in_place=True)
