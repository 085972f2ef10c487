"""Several new tokens per sequence against rows of keys and values that lie in pages."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.dispatch import no_triton, pick
from ag.kernels.paged_attend import cpu
from ag.kernels.paged_attend.reference import reference_paged_attend
from ag.kernels.pages import Pages
from ag.kernels.softmax import PLAIN, Softmax


def paged_attend(
    q: Tensor,
    pages: Pages,
    ranks: Tensor,
    scaling: float,
    window: int | None = None,
    recent: int | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Attend from each query to the tokens of its row that are not newer, where they lie.

    Args:
        q: ``[B, H, T, D]``; query head h reads KV head h // (H / Hkv).
        pages: the rows, among them the tokens of the queries; with ``recent`` their gate column is bool: open or
            closed.
        ranks: ``[B, T]`` long, of the queries; one below 0 sees nothing.
        scaling: factor of the logits.
        window: distance from which on no query sees a token; None without a sliding window.
        recent: newest tokens that a query sees whatever their gates, its own included; None: gates do not matter.
        softmax: caps and sink logits of the model.

    Returns:
        ``[B, H, T, Dv]``, softmax and sums in float32 (float64 for float64 arguments); 0 where a query sees nothing.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    version = pick(
        "paged_attend",
        {
            "triton": pages.mixed(q) or no_triton(q, widest=pages.channels[1]),
            "cpp": cpu.unavailable(pages),
            "reference": None,
        },
    )
    attend = {"cpp": cpu.paged_attend}.get(version, reference_paged_attend)
    if version == "triton":
        from ag.kernels.paged_attend.triton import triton_paged_attend as attend
    return attend(q, pages, ranks, scaling, window, recent, softmax)
