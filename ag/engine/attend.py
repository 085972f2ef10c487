"""Attention from new queries to what a layer holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.engine.storage import RaggedStore, Rows
from ag.kernels.ragged_decode import ragged_decode, ragged_decode_weights
from ag.model.hooks import AttentionCall

QUERY_BLOCK = 256  # queries that meet the stored keys at once


def attend_one(call: AttentionCall, store: RaggedStore, ranks: Tensor, seen: int) -> Tensor:
    """Attend from one query per sequence to the stored tokens where they lie, ``[B, H, 1, D]``.

    Args:
        call: the query's; its token is stored.
        store: what the layer holds.
        ranks: ``[B, 1]`` long, of the queries.
        seen: columns of the input so far: a window that is no shorter hides nothing.
    """
    starts, lengths = store.rows
    if call.window is not None and seen > call.window:
        past = store.count_below(ranks[:, 0] - call.window + 1)
        starts, lengths = starts + past, lengths - past
    out = ragged_decode(call.q[:, :, 0], store.keys, store.values, starts, lengths, call.scaling)
    return out[:, :, None]


def attend_one_weights(call: AttentionCall, store: RaggedStore) -> tuple[Tensor, Tensor | None]:
    """Do what :func:`attend_one` does where no window hides anything, and give the weights too.

    Args:
        call: the query's; its token is stored.
        store: what the layer holds, N tokens in its longest row.

    Returns:
        ``[B, H, 1, D]``, and the weights ``[B, H, N]`` in float32 where they cost little, else None.
    """
    q, longest = call.q[:, :, 0], store.layout.longest
    out, weights = ragged_decode_weights(q, store.keys, store.values, *store.rows, call.scaling, longest)
    return out[:, :, None], weights


def attend_rows(
    call: AttentionCall, held: Rows, ranks: Tensor, *, recent: int = 0, keep: Tensor | None = None
) -> Tensor:
    """Attend from queries of ranks ``[B, T]`` to everything held that is not newer, ``[B, H, T, D]``.

    Args:
        call: gives the queries, as they meet the keys that are held.
        held: what the layer holds, the new tokens among it.
        ranks: ``[B, T]`` long, of the queries.
        recent: distance from which on only tokens whose gate is open are visible; 0: all are.
        keep: ``[B, Hkv, N]`` bool, what queries see beside their own tokens; None: everything.
    """
    blocks = zip(call.q.split(QUERY_BLOCK, 2), ranks.split(QUERY_BLOCK, 1), strict=True)
    rows, batch = len(held.ranks), len(call.q)
    free = call.q.shape[2] == 1 and call.window is None and not recent and keep is None
    outs = []
    for q, block in blocks:
        visible = None if held.valid is None else held.valid[:, None]
        if not free:
            distance = block.repeat_interleave(rows // batch, 0)[:, :, None] - held.ranks[:, None]
            near = distance >= 0
            if call.window is not None:
                near = near & (distance < call.window)
            if recent and held.gate is not None:
                near = near & (held.gate[:, None] | (distance < recent))
            if keep is not None:
                near = near & (keep.flatten(0, 1)[:, None] | (distance == 0))
            visible = near if visible is None else visible & near
        outs.append(_attend_block(q, held, visible, call.scaling))
    return torch.cat(outs, 2)


def _attend_block(q: Tensor, held: Rows, visible: Tensor | None, scaling: float) -> Tensor:
    """Attend from ``[B, H, T, D]`` to rows, each of which serves a group of query heads; ``visible`` ``[R, T, N]``."""
    batch, heads, length, dim = q.shape
    rows, tokens = held.ranks.shape
    group = batch * heads // rows
    if visible is not None:
        visible = visible[:, None].expand(rows, group, length, tokens).reshape(rows, 1, group * length, tokens)
    out = F.scaled_dot_product_attention(
        q.reshape(rows, 1, group * length, dim), held.keys[:, None], held.values[:, None], visible, scale=scaling
    )
    return out.view(batch, heads, length, -1)
