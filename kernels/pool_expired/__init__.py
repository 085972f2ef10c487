"""The tokens that leave the recent ones, or the window, when a new token comes."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.dispatch import no_triton, pick
from ag.kernels.pages import Pages
from ag.kernels.pool_expired import cpu
from ag.kernels.pool_expired.reference import reference_pool_expired


def pool_expired(pages: Pages, ranks: Tensor, recent: int | None, window: int | None) -> Tensor:
    """Find what the query of a new token no longer sees, beside what no query before it saw.

    That is the token of rank ``n - recent`` where its gate is closed, and that of rank ``n - window``, n being the
    rank of the new token.

    Args:
        pages: the rows, without their new tokens; with ``recent`` their gate column is bool: open or closed.
        ranks: ``[B]`` long, of the new tokens; below 0 where a sequence has none, from which nothing goes.
        recent: newest tokens that a query sees whatever their gates, its own included; None: gates do not matter.
        window: distance from which on no query sees a token, not below ``recent``; None without a sliding window.

    Returns:
        ``[R, 2]`` int32, the slots of both; -1 where a row does not hold such a token.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    version = pick(
        "pool_expired",
        {"triton": no_triton(pages.keys), "cpp": cpu.unavailable(pages.ranks), "reference": None},
    )
    find = {"cpp": cpu.pool_expired}.get(version, reference_pool_expired)
    if version == "triton":
        from ag.kernels.pool_expired.triton import triton_pool_expired as find
    return find(pages, ranks, recent, window)
