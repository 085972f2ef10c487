"""One new token per sequence against rows of keys and values that lie in pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ag.kernels.dispatch import no_triton, pick
from ag.kernels.paged_decode import cpu
from ag.kernels.paged_decode.reference import reference_paged_decode


def paged_decode(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scaling: float) -> Tensor:
    """Attend from one query per sequence to all that its rows hold.

    Row ``b * Hkv + h`` is KV head h of sequence b; its slot t lies in page ``table[r, t // page]``, at place
    ``t % page``. The host knows no length: how work is cut follows from the width of the table.

    Args:
        q: ``[B, H, 1, D]``; query head h reads KV head h // (H / Hkv).
        keys: ``[P, page, D]``, a column of a pool, like the next.
        values: ``[P, page, Dv]``.
        table: ``[R, most]`` int32, R = B Hkv, the pages of each row; behind a row's last page anything.
        lengths: ``[R]`` int32, slots that hold a token; a row of none gives 0.
        scaling: factor of the logits.

    Returns:
        ``[B, H, 1, Dv]``, softmax and sums in float32 (float64 for float64 arguments).

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    return _run(q, keys, values, table, lengths, scaling, None)


def paged_decode_weights(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Do what :func:`paged_decode` does, with its arguments, and hand out the weights; no key is read again for them.

    Returns:
        What ``paged_decode`` returns; and the weights ``[B, H, most page]`` in float32 by slot of the row, 0 behind its
        end. A table that is cut, ``table[:, :n]``, makes them narrower.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    slots = table.shape[1] * keys.shape[1]
    weights = torch.empty(*q.shape[:2], slots, dtype=torch.float32, device=q.device)
    return _run(q, keys, values, table, lengths, scaling, weights), weights


def _run(q: Tensor, keys: Tensor, values: Tensor, *others: Any) -> Tensor:
    mixed = None if q.dtype == keys.dtype == values.dtype else "queries, keys and values differ in type"
    version = pick(
        "paged_decode",
        {"triton": mixed or no_triton(q, values), "cpp": cpu.unavailable(keys, values), "reference": None},
    )
    attend = {"cpp": cpu.paged_decode}.get(version, reference_paged_decode)
    if version == "triton":
        from ag.kernels.paged_decode.triton import triton_paged_decode as attend
    return attend(q, keys, values, *others)
