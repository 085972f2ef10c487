"""Attention from new queries to what a layer holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.engine.pool import PAGE
from ag.engine.store import PagedStore, Rows
from ag.kernels.paged_decode import paged_decode, paged_decode_weights
from ag.kernels.softmax import Softmax, weigh
from ag.model.hooks import AttentionCall

QUERY_BLOCK = 256  # queries that meet the stored keys at once
PAIRS = 2**26  # of a row's query and key at once: what says which keys a query sees takes three bytes each in 16 bits
FEW = 16  # new queries of a sequence


def attend_one(call: AttentionCall, store: PagedStore) -> Tensor:
    """Attend from one query per sequence to all stored tokens, its own too, where they lie, ``[B, H, 1, D]``."""
    return paged_decode(call.q, store.rows, call.scaling, call.softmax)


def attend_one_weights(call: AttentionCall, store: PagedStore) -> tuple[Tensor, Tensor]:
    """Do what :func:`attend_one` does, and give the weights ``[B, H, N]`` float32 too, N slots of the store wide."""
    rows, width = store.rows, store.width
    table = rows.table[:, : -(-width // PAGE)]
    out, weights = paged_decode_weights(call.q, rows._replace(table=table), call.scaling, call.softmax)
    return out, weights[..., :width]


def attend_rows(call: AttentionCall, held: Rows, ranks: Tensor, *, recent: int = 0) -> Tensor:
    """Attend from queries of ranks ``[B, T]`` to everything held that is not newer, ``[B, H, T, D]``.

    So many queries at once that they make at most PAIRS with the slots of all rows: memory does not grow with both.

    Args:
        call: gives the queries, as they meet the keys that are held.
        held: the new tokens among it.
        ranks: of the queries.
        recent: distance from which on only tokens whose gate is open are visible; 0: all are.
    """
    batch, _, length, _ = call.q.shape
    rows, tokens = held.ranks.shape
    width = max(1, min(QUERY_BLOCK, PAIRS // max(1, rows * tokens)))
    free = length == 1 and call.window is None and not recent
    outs = []
    for q, block in zip(call.q.split(width, 2), ranks.split(width, 1), strict=True):
        if free:
            bias = None if held.valid is None else _bias(~held.valid[:, None], q)
        else:
            at = block.repeat_interleave(rows // batch, 0)[:, :, None]
            bias = _bias(_hidden(held, at, call.window, recent), q)
        if call.softmax.plain:
            outs.append(_attend_block(q, held, bias, call.scaling, together=length <= FEW))
        else:
            outs.append(_attend_softmax(q, held, bias, call.scaling, call.softmax))
        del bias  # the next one can have its memory
    return torch.cat(outs, 2)


def _hidden(held: Rows, at: Tensor, window: int | None, recent: int) -> Tensor:
    """Return ``[R, w, N]`` bool, what queries of ranks ``at`` ``[R, w, 1]`` do not see."""
    ranks = held.ranks[:, None]
    hidden = ranks > at
    if window is not None:
        hidden |= ranks <= at - window
    if recent and held.gate is not None:
        hidden |= (ranks <= at - recent) & ~held.gate[:, None]
    if held.valid is not None:
        hidden |= ~held.valid[:, None]
    return hidden


def _bias(hidden: Tensor, like: Tensor) -> Tensor:
    """Return what is added to the logits, of their type; PyTorch would make it too, beside two more masks."""
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


def _attend_block(q: Tensor, held: Rows, bias: Tensor | None, scaling: float, *, together: bool) -> Tensor:
    """Attend from ``[B, H, T, D]`` to rows, each of which serves a group of heads, with a bias ``[R, T or 1, N]``.

    ``together``: a group's queries meet a key at once, which few of them do faster, but not with one bias.
    """
    batch, heads, length, dim = q.shape
    rows, tokens = held.ranks.shape
    group = batch * heads // rows
    k, v = held.keys[:, None], held.values[:, None]
    if together:
        q = q.reshape(rows, 1, group * length, dim)
        if bias is not None:
            bias = bias[:, None].expand(rows, group, length, tokens).reshape(rows, 1, group * length, tokens)
    else:
        q = q.reshape(rows, group, length, dim)
        k, v = (x.expand(-1, group, -1, -1) for x in (k, v))
        bias = None if bias is None else bias[:, None]
    return F.scaled_dot_product_attention(q, k, v, bias, scale=scaling).reshape(batch, heads, length, -1)


def _attend_softmax(q: Tensor, held: Rows, bias: Tensor | None, scaling: float, softmax: Softmax) -> Tensor:
    """Do what :func:`_attend_block` does where logits are capped or have sinks, which PyTorch's attention has not."""
    rows, acc = len(held.ranks), torch.promote_types(q.dtype, torch.float32)
    queries = q.reshape(rows, -1, *q.shape[2:]).to(acc)
    s = softmax.capped(queries @ held.keys[:, None].to(acc).mT * scaling)
    s = s if bias is None else s + bias[:, None]
    sinks = softmax.by_row(*s.shape[:2])
    weights = weigh(s, None if sinks is None else sinks[:, :, None, None])
    return (weights @ held.values[:, None].to(acc)).to(q.dtype).reshape(*q.shape[:3], -1)
