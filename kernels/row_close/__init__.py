"""Close the gaps that evicted tokens leave in rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ag.kernels.dispatch import pick, recorded
from ag.kernels.row_close import cpu
from ag.kernels.row_close.reference import reference_row_close


def row_close(
    columns: Sequence[Tensor], keep: Tensor, starts: Tensor, lengths: Tensor, *, to_end: bool | None = None
) -> bool:
    """Move the kept tokens of each row together, in place and in their order.

    Row r fills the slots ``starts[r] : starts[r] + lengths[r]`` of flat buffers; rows do not overlap. Its kept tokens
    then begin where the row began, or end where it ended: the same for all rows. Other slots of a row hold anything.

    Args:
        columns: one to four buffers ``[S, ...]`` with something of each token, of any types.
        keep: ``[R, N]`` bool, which tokens stay; slot n of a row is ``starts[r] + n``, and those from its length on do
            not count. N is not below the longest row.
        starts: ``[R]`` long, on the device of the columns.
        lengths: ``[R]`` long, on the device of the columns.
        to_end: whether rows shall end where they ended; None: the side where fewer tokens have to move.

    Returns:
        Whether they do.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    version = pick("row_close", {"cpp": recorded(*columns) or cpu.unavailable(*columns), "reference": None})
    close = cpu.row_close if version == "cpp" else reference_row_close
    return close(columns, keep, starts, lengths, to_end=to_end)


def closed(x: Tensor, keep: Tensor) -> Tensor:
    """Return ``[B, H, ..., N]`` without what is not in ``keep`` ``[B, Hkv, N]``, ``[B, H, ..., N']``.

    H is a multiple of Hkv. N' is the most that a head keeps; the ends of heads that keep fewer are 0.
    """
    tokens, counts = keep.shape[-1], keep.sum(-1)
    heads = keep.repeat_interleave(x.shape[1] // keep.shape[1], 1)
    while heads.ndim < x.ndim:
        heads = heads.unsqueeze(2)
    rows = heads.expand_as(x).reshape(-1, tokens)
    wide = x.clone(memory_format=torch.contiguous_format)
    starts = torch.arange(0, wide.numel(), tokens, device=x.device)
    row_close([wide.view(-1)], rows, starts, torch.full_like(starts, tokens), to_end=False)
    longest = int(counts.max())
    x = wide[..., :longest]  # below it is copied, for a view would hold the memory of all N
    if int(counts.min()) < longest:
        held = torch.arange(longest, device=x.device) < rows.sum(-1, keepdim=True)
        return x.contiguous().masked_fill_(~held.view(x.shape), 0)
    return x.clone(memory_format=torch.contiguous_format)
