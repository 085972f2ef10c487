"""One new token per sequence against rows of keys and values that lie in pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ag.kernels.dispatch import no_triton, pick
from ag.kernels.paged_decode import cpu
from ag.kernels.paged_decode.reference import reference_paged_decode
from ag.kernels.pages import Pages
from ag.kernels.softmax import PLAIN, Softmax


def paged_decode(q: Tensor, pages: Pages, scaling: float, softmax: Softmax = PLAIN) -> Tensor:
    """Attend from one query per sequence to all that its rows hold.

    The host knows no length: how work is cut follows from the width of the table.

    Args:
        q: ``[B, H, 1, D]``; query head h reads KV head h // (H / Hkv).
        pages: the rows; one of no tokens gives 0.
        scaling: factor of the logits.
        softmax: caps and sink logits of the model.

    Returns:
        ``[B, H, 1, Dv]``, softmax and sums in float32 (float64 for float64 arguments).

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    return _run(q, pages, scaling, None, softmax)


def paged_decode_weights(q: Tensor, pages: Pages, scaling: float, softmax: Softmax = PLAIN) -> tuple[Tensor, Tensor]:
    """Do what :func:`paged_decode` does, with its arguments, and hand out the weights; no key is read again for them.

    Returns:
        What ``paged_decode`` returns; and the weights ``[B, H, most page]`` in float32 by slot of the row, 0 behind its
        end. A table that is cut, ``table[:, :n]``, makes them narrower.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    slots = pages.table.shape[1] * pages.keys.shape[1]
    weights = torch.empty(*q.shape[:2], slots, dtype=torch.float32, device=q.device)
    return _run(q, pages, scaling, weights, softmax), weights


def _run(q: Tensor, pages: Pages, *others: Any) -> Tensor:
    version = pick(
        "paged_decode",
        {
            "triton": pages.mixed(q) or no_triton(q, widest=pages.channels[1]),
            "cpp": cpu.unavailable(pages),
            "reference": None,
        },
    )
    attend = {"cpp": cpu.paged_decode}.get(version, reference_paged_decode)
    if version == "triton":
        from ag.kernels.paged_decode.triton import triton_paged_decode as attend
    return attend(q, pages, *others)
