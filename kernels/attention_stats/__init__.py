"""The sum, the maximum or the sum of squares of the attention weights of each key."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

from ag.kernels.attention_stats import cpu
from ag.kernels.attention_stats.reference import Kind as Kind
from ag.kernels.dispatch import VARIABLE, Versions, function, no_triton
from ag.kernels.softmax import PLAIN, Softmax


def attention_stats(
    kind: Kind,
    q: Tensor,
    k: Tensor,
    query_indices: Tensor,
    key_indices: Tensor,
    scaling: float,
    window: int | None = None,
    skip: int = 0,
    factors: Tensor | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Reduce ``a_jt = f_j A_jt`` over the queries j to a number for each key t; ``A = softmax(scaling q k^T)``.

    Attention is causal by token index.

    Args:
        kind: ``sum`` of a_jt over j, ``max`` of them, or ``squares``, the sum of their squares.
        q: queries ``[B, H, M, D]``; query head h reads KV head h // (H / Hkv).
        k: keys ``[B, Hkv, N, D]``, in any order; undefined where there is no token.
        query_indices: ``[B, M]`` long, the token index of each query; a query of a negative index does not count.
        key_indices: ``[B, Hkv or 1, N]`` long, likewise; a negative index means that there is no token.
        scaling: factor of the logits.
        window: a query sees keys at a smaller distance than this. None: no sliding window.
        skip: pairs at a smaller distance do not count, but they take part in the softmax.
        factors: f ``[B, M]``, 0 or more. None: all are 1.
        softmax: cap and sink logits of the model.

    Returns:
        ``[B, H, N]`` float32 (float64 for float64 arguments), 0 for keys without a counted query.

    Raises:
        UserError: ``AG_KERNELS`` names a version that cannot run (see ag.kernels.dispatch).
    """
    compute = _version(q.device.type, q.dtype, k.dtype, q.shape[-1], os.environ.get(VARIABLE))
    return compute(kind, q, k, query_indices, key_indices, scaling, window, skip, factors, softmax)


@functools.cache
def _version(
    device: str, queries: torch.dtype, keys: torch.dtype, size: int, forced: str | None
) -> Callable[..., Tensor]:
    wide = f"{torch.float64} is more than float32" if torch.float64 in (queries, keys) else None
    versions: Versions = {
        "triton": no_triton(device, queries, size) if queries == keys else "queries and keys differ in type",
        "cpp": lambda: wide or cpu.KERNEL.unavailable(device),
        "reference": None,
    }
    return function("attention_stats", versions, forced)
