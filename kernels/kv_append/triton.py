"""Appending in Triton: one program for up to 64 tokens of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ag.kernels.dispatch import INTERPRETED
from ag.kernels.pages import Pages, coded
from ag.kernels.tiles import copy_tokens, pool_indices


@triton.jit(do_not_specialize=["T", "blocks"])
def _append(keys, values, index_column, gate, table, lengths, after, k, v, token_indices, gate_values, k_strides,
            v_strides, stride, T, blocks, H, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
            PAGE: tl.constexpr, TOKENS: tl.constexpr, UNGATED: tl.constexpr):  # fmt: skip
    """Store TOKENS of the T new tokens of a row, after the row's tokens and its earlier new tokens."""
    row, block = tl.cast(tl.program_id(0) // blocks, tl.int64), tl.program_id(0) % blocks
    b, h = row // H, row % H
    token_indices += b * T
    table += row * stride
    length = tl.load(lengths + row)
    for n in range(0, block * TOKENS, TOKENS):
        length += tl.sum((tl.load(token_indices + n + tl.arange(0, TOKENS)) >= 0).to(tl.int32), 0)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    token_index = tl.load(token_indices + tokens, mask=tokens < T, other=-1)
    valid = token_index >= 0
    number = valid.to(tl.int32)
    slots = tl.where(valid, length + tl.cumsum(number, 0) - 1, 0)
    pool_index = pool_indices(table, slots, valid, PAGE)
    tokens = tokens.to(tl.int64)
    copy_tokens(keys, k + b * k_strides[0] + h * k_strides[1], k_strides[2], tokens, pool_index, valid, D, DP)
    copy_tokens(values, v + b * v_strides[0] + h * v_strides[1], v_strides[2], tokens, pool_index, valid, E, EP)
    tl.store(index_column + pool_index, token_index.to(tl.int32), mask=valid)
    if gate is not None:
        new_gate = tl.full([TOKENS], UNGATED, gate.dtype.element_ty)
        if gate_values is not None:
            new_gate = tl.load(gate_values + row * T + tokens, mask=valid, other=0)
        tl.store(gate + pool_index, new_gate, mask=valid)
    if block == blocks - 1:
        tl.store(after + row, length + tl.sum(number, 0))


@torch.compiler.disable
def kv_append(pages: Pages, k: Tensor, v: Tensor, token_indices: Tensor, gate: Tensor | None = None) -> None:
    """Do what :func:`ag.kernels.kv_append.kv_append` does on a GPU, without synchronising."""
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in coded(pages, k, v))
    (_, heads, count, dim), width, rows = k.shape, v.shape[3], len(pages.block_table)
    column, lengths = pages.gate, pages.lengths
    gate_values = None if gate is None or column is None else gate.to(column.dtype).contiguous()
    column, gate_values = (
        x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x for x in (column, gate_values)
    )
    tokens = 16 if INTERPRETED else min(64, triton.next_power_of_2(count))
    blocks = triton.cdiv(count, tokens)
    after = lengths if blocks == 1 else torch.empty_like(lengths)  # other programs of a row read its length
    with torch.cuda.device_of(k):
        _append[(rows * blocks,)](
            *(pages.keys, pages.values, pages.token_indices, column, pages.block_table, lengths, after, k, v),
            *(token_indices.contiguous(), gate_values, k.stride()[:3], v.stride()[:3], pages.block_table.stride(0)),
            *(count, blocks, heads),
            *(dim, triton.next_power_of_2(dim), width, triton.next_power_of_2(width), pages.keys.shape[1], tokens),
            pages.ungated_value,
        )
    if after is not lengths:
        lengths.copy_(after)
