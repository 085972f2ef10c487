"""The rule of eviction: which tokens of a KV head are kept.

The engine, training by replay and the server's admission follow this one rule. A token index counts the tokens of a
sequence from 0, without padding. After T tokens, in a layer with a sliding window of W tokens:

    protected    token_index < sinks, token_index >= T - recent, or protected by the caller
    expired      token_index <= T - W: no later query sees the token
    keep count   k = max(budget, number of protected tokens that have not expired)

A head keeps its protected tokens, and of the other tokens those with the highest scores until it has k tokens. Of two
equal scores the older token is kept. Example: of 10 tokens with 2 sinks, 3 recents and a budget of 6, tokens 0, 1, 7,
8 and 9 are kept, and the best of tokens 2 to 6.

:func:`eviction_score` writes the first two lines into the score, as +inf and -inf. The evicting kernels therefore need
only this score and k.
"""

from __future__ import annotations

import torch
from torch import Tensor

INF, NAN = float("inf"), float("nan")


def protected_mask(
    token_index: Tensor,
    num_tokens: Tensor,
    sinks: int | Tensor,
    recent: int | Tensor,
    caller_protected: Tensor | None = None,
) -> Tensor:
    """Return which tokens are kept whatever their score.

    Args:
        token_index: ``[..., B, H, N]``; where it is negative, for no token, the result means nothing.
        num_tokens: ``[B]`` long, T.
        sinks: number of first tokens that are kept, an int or ``[B]``.
        recent: number of newest tokens that are kept, an int or ``[B]``.
        caller_protected: ``[B, M]`` bool, by token index; tokens from M on are not protected by the caller. None: the
            caller protects no token.

    Returns:
        Bool, shaped like ``token_index``.
    """
    sinks = sinks if isinstance(sinks, int) else sinks[:, None, None]
    mask = (token_index < sinks) | (token_index >= (num_tokens - recent)[:, None, None])
    if caller_protected is None:
        return mask
    inside = (token_index >= 0) & (token_index < caller_protected.shape[1])
    by_caller = caller_protected[:, None].expand(*token_index.shape[:-1], -1)
    return mask | (inside & by_caller.gather(-1, token_index.where(inside, 0).long()))


def expired_mask(token_index: Tensor, num_tokens: Tensor, sliding_window: int) -> Tensor:
    """Return which tokens no later query sees, bool like ``token_index`` ``[..., B, H, N]``; ``num_tokens`` ``[B]``."""
    return token_index <= (num_tokens - sliding_window)[:, None, None]


def count_protected(
    num_tokens: Tensor,
    sinks: int | Tensor,
    recent: int | Tensor,
    caller_protected: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Return how many of the tokens 0 to T - 1 are protected and have not expired, ``[B]`` long.

    The arguments are those of :func:`protected_mask`. A ``sliding_window`` of None means that no token expires.
    """
    first = torch.zeros_like(num_tokens) if sliding_window is None else (num_tokens - sliding_window + 1).clamp_min(0)
    recent_start = (num_tokens - recent).maximum(first)
    sinks_end = (torch.zeros_like(num_tokens) + sinks).maximum(first).minimum(recent_start)
    number = (sinks_end - first) + (num_tokens - recent_start)
    if caller_protected is None:
        return number
    token_index = torch.arange(caller_protected.shape[1], device=caller_protected.device)
    between = (token_index >= sinks_end[:, None]) & (token_index < recent_start[:, None])
    return number + (caller_protected & between).sum(1)


def share_of(tokens: Tensor, share: float) -> Tensor:
    """Return a share of numbers of tokens, long, rounded down."""
    return (tokens.double() * share + 1e-9).long()  # 0.29 of 100 are 29, though 0.29 * 100 is a little less


def keep_count(budget: Tensor, num_protected: Tensor) -> Tensor:
    """Return how many tokens a head keeps: its budget, or its protected tokens if these are more."""
    return budget.maximum(num_protected)


def eviction_score(score: Tensor, protected: Tensor, expired: Tensor | None = None) -> Tensor:
    """Return the score with +inf for protected tokens, -inf for expired ones, and NaN if it was not finite.

    ``expired`` takes precedence; None means that no token has expired.
    """
    score = score.nan_to_num(NAN, NAN, NAN).masked_fill(protected, INF)
    return score if expired is None else score.masked_fill(expired, -INF)


def keep_mask(score: Tensor, keep_count: Tensor, token_index: Tensor | None = None) -> Tensor:
    """Return which tokens are kept, bool like ``score`` ``[..., N]``: the best ``keep_count``, and all of +inf.

    Args:
        score: of :func:`eviction_score`. If fewer tokens have a higher score, tokens of -inf are kept too.
        keep_count: ``[...]`` long, tokens to keep.
        token_index: ``[..., N]``; of equal scores the lower index is kept. None: the tokens are in ascending order.
    """
    if token_index is None:
        order = score.argsort(dim=-1, descending=True, stable=True)
    else:
        order = token_index.argsort(-1)
        order = order.gather(-1, score.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    first = (torch.arange(score.shape[-1], device=score.device) < keep_count[..., None]).expand_as(score)
    return torch.zeros_like(first).scatter(-1, order, first) | (score == INF)
