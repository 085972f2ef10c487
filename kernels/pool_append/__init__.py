"""New tokens into rows that lie in pages, in place of tokens that go."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ag.kernels.dispatch import no_triton, pick, recorded
from ag.kernels.pages import New as New
from ag.kernels.pages import Pages, Reach
from ag.kernels.pool_append import cpu
from ag.kernels.pool_append.reference import reference_pool_append


def pool_append(
    pages: Pages,
    new: New | None = None,
    victims: Tensor | None = None,
    records: Sequence[Tensor] = (),
    reach: Reach | None = None,
) -> None:
    """Add a new token to each row, and close the gaps of those that go by the last tokens of their rows, in place.

    A new token comes behind its row's last one. Then the victims go, the highest slot first: each time the row's last
    token takes the free slot. So a new token that comes with a victim is written into its slot, and nothing moves.

    Args:
        pages: the rows; each has a page for its new token, and none of what is written is shared with another row.
            ``lengths`` changes in place too.
        new: one token of each row, in the pool's types; None if none comes.
        victims: ``[R, V]`` int32, slots of the tokens that go, the new one's among them, each row's distinct; -1: none.
        records: ``[R, C, S]`` float32 each, numbers of each token by slot, which go with it; those of a new token and
            of free slots are 0.
        reach: what the queries of the new tokens see; victims are those that they no longer do, found among the ranks
            of each row, and ``victims`` is None. With ``recent`` the gate column is bool: open or closed.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
        TypeError: when new keys or values have another type than the pool's.
    """
    held = pages.dtypes
    if new is not None and (new.keys.dtype, new.values.dtype) != held:
        raise TypeError(
            f"new keys and values of {new.keys.dtype} and {new.values.dtype}: expected {held[0]} and {held[1]} as held"
        )
    autograd = recorded(pages.keys, pages.values, *(() if new is None else (new.keys, new.values)))
    version = pick(
        "pool_append",
        {
            "triton": autograd or no_triton(pages.keys, pages.values, dtype=held[0]),
            "cpp": autograd or cpu.unavailable(pages, *records),
            "reference": None,
        },
    )
    append = {"cpp": cpu.pool_append}.get(version, reference_pool_append)
    if version == "triton":
        from ag.kernels.pool_append.triton import triton_pool_append as append
    append(pages, new, victims, records, reach)
