"""New tokens into blocks, token by token: the oracle of the fast versions."""

from __future__ import annotations

import torch
from torch import Tensor

from ag.kernels.pages import Pages, coded


def reference_kv_append(pages: Pages, k: Tensor, v: Tensor, ranks: Tensor, gate: Tensor | None = None) -> None:
    """Do what :func:`ag.kernels.kv_append.kv_append` does."""
    page, heads = pages.keys.shape[1], k.shape[1]
    keys, values = coded(pages, k, v)
    for row, table in enumerate(pages.table.tolist()):
        sequence, head = divmod(row, heads)
        length = int(pages.lengths[row])
        for t, rank in enumerate(ranks[sequence].tolist()):
            if rank < 0:
                continue
            at = table[length // page], length % page
            pages.keys[at], pages.values[at] = keys[sequence, head, t], values[sequence, head, t]
            pages.ranks[at] = rank
            if pages.gate is not None:
                said = torch.ones(()) if gate is None else gate[sequence, head, t]
                pages.gate[at] = said.to(pages.gate.dtype)
            length += 1
        pages.lengths[row] = length
