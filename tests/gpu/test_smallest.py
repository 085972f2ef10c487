"""The smallest case of each Triton kernel: for compute-sanitizer, which makes a launch a hundred times slower.

Lengths are odd, so that every mask is used, and each result is held to its reference.
"""

import pytest
import torch

from ag.kernels.attention_stats import attention_stats
from ag.kernels.attention_stats import reference as stats_reference
from ag.kernels.attention_stats.reference import STATISTICS
from ag.kernels.gated_attention import gated_attention
from ag.kernels.gated_prefill import gated_prefill
from ag.kernels.kv_append import kv_append
from ag.kernels.kv_append import reference as append_reference
from ag.kernels.kv_compact import kv_compact
from ag.kernels.kv_compact import reference as compact_reference
from ag.kernels.paged_attention import paged_attention
from ag.kernels.paged_attention import reference as paged_reference
from ag.kernels.pages import Pages
from ag.kernels.softmax import PLAIN, Softmax
from tests.gpu.cases import DEVICE, arguments, draw, exact, formula, run
from tests.support.bounds import near, right

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("triton_only")]
SMALL = {"length": 19, "group": 2, "dim": 20, "dtype": torch.float32}


def test_gated_attention():
    tensors, keep, options = arguments(
        **SMALL, padding="left", window=11, recent=2, sinks=1, dense=True, documents=True
    )
    weight = draw(*tensors[0].shape)
    got = run(gated_attention, [*tensors, keep], weight, options)
    want = exact(formula, [*tensors, keep], weight, options)
    for what, mine, theirs in zip(["out", "dq", "dk", "dv", "dkeep"], got, want, strict=True):
        near(mine, theirs, what)


def test_gated_prefill():
    (q, k, v), keep, options = arguments(**SMALL, padding="left", window=11, recent=2, sinks=1)
    want = exact(formula, [q, k, v, keep], torch.ones_like(q), options, gradients=False)[0]
    near(gated_prefill(q, k, v, keep.bool(), **options), want, "out")


def test_attention_stats():
    (q, k, _), *_ = arguments(**SMALL)
    token_indices = torch.arange(19, device=DEVICE)
    own, held = token_indices.expand(len(q), -1), torch.rand(*k.shape[:3], device=DEVICE).argsort(-1) - 3
    options = {"window": 11, "skip": 1, "factors": torch.rand(own.shape, device=DEVICE)}
    options["softmax"] = Softmax(3.0, torch.linspace(-1, 1, q.shape[1], device=DEVICE))
    for kind in STATISTICS:
        function = lambda *x, kind=kind: [stats_reference.attention_stats(kind, *x, own, held, 0.3, **options)]  # noqa: E731
        (want,) = right(function, q, k)
        near(attention_stats(kind, q, k, own, held, 0.3, **options), want, kind)


def rows_in_pages():
    """Four rows of at most six tokens in pages of 4, and what a scorer recorded of them."""
    table = torch.tensor([[3, 0], [5, 7], [2, 6], [1, 4]], dtype=torch.int32)
    columns = torch.zeros(8, 4, 20), torch.zeros(8, 4, 12), torch.zeros(8, 4).int(), torch.zeros(8, 4).bool()
    pages = [x.to(DEVICE) for x in (*columns, table, torch.zeros(4, dtype=torch.int32))]
    return Pages(*pages), torch.zeros(4, 3, 8, device=DEVICE)


def same(mine, theirs):
    """Assert that two pools hold the same in the slots of their rows; free slots hold anything."""
    assert torch.equal(mine.lengths, theirs.lengths)
    slots = torch.arange(8, device=DEVICE)
    at = (mine.block_table[:, slots // 4] * 4 + slots % 4)[slots < mine.lengths[:, None]]
    for x, y in zip(mine.columns, theirs.columns, strict=True):
        assert torch.equal(x.flatten(0, 1)[at], y.flatten(0, 1)[at])


def test_kv_append():
    """Five tokens of each sequence, two of which are padding, and then one of the second sequence."""
    torch.manual_seed(0)
    (mine, _), (theirs, _) = rows_in_pages(), rows_in_pages()
    for at in ([[0, 1, -1, 2, -1], [-1, -1, 0, 1, 2]], [[-1], [3]]):
        token_indices = torch.tensor(at, device=DEVICE)
        given = draw(2, 2, len(at[0]), 20), draw(2, 2, len(at[0]), 12), token_indices, draw(2, 2, len(at[0])) > 0
        kv_append(mine, *given)
        append_reference.kv_append(theirs, *given)
    assert mine.lengths.tolist() == [3, 3, 4, 4]
    same(mine, theirs)


def test_kv_compact():
    """First a mask, then the best scores of the tokens that it left; some are +inf or -inf."""
    slots = torch.arange(8, device=DEVICE)
    by_score = draw(2, 2, 8).masked_fill(slots == 1, float("inf"))
    by_score[1] = by_score[1].masked_fill(slots == 2, -float("inf"))
    keep = torch.rand(2, 2, 8, device=DEVICE) < 0.8
    rounds = (torch.where(keep, float("inf"), -float("inf")), None), (by_score, [2, 0, 3, 1])
    both = []
    for compact in (kv_compact, compact_reference.kv_compact):
        pages, (_, noted) = rows_of_tokens(), rows_in_pages()
        nonfinite = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        pages.token_indices.copy_(torch.arange(32, device=DEVICE).view(8, 4) % 11)
        noted += (slots < pages.lengths[:, None])[:, None] * pages.lengths[:, None, None]
        for score, count in rounds:
            marked = (keep.flatten(0, 1) & (slots < pages.lengths[:, None])).sum(1)
            count = marked if count is None else torch.tensor(count, device=DEVICE)
            compact(pages, score, count.int(), [noted], nonfinite)
        both.append((pages, noted, nonfinite))
    (mine, noted, nonfinite), (theirs, wanted, _) = both
    same(mine, theirs)
    assert torch.equal(noted, wanted) and not nonfinite.any()


def rows_of_tokens():
    """Rows of 0, 1, 6 and 8 tokens; free slots hold no numbers."""
    torch.manual_seed(0)
    pages, _ = rows_in_pages()
    pages.lengths.copy_(torch.tensor([0, 1, 6, 8]))
    slots = torch.arange(8, device=DEVICE)
    at = (pages.block_table[:, slots // 4] * 4 + slots % 4)[slots < pages.lengths[:, None]]
    for x in (pages.keys, pages.values):
        x.fill_(torch.nan).flatten(0, 1)[at] = draw(15, x.shape[2])
    return pages


def test_paged_attention():
    pages = rows_of_tokens()
    pages.token_indices.copy_(torch.rand(8, 4, device=DEVICE).argsort(-1) * 3)
    pages.gate.copy_(torch.rand(8, 4, device=DEVICE) < 0.5)
    several = torch.tensor([[-1, 5, 6], [7, 8, 9]], device=DEVICE)
    cases = ((1, None, None, None), (1, several[:, 2:], 7, 3), (3, several, None, None), (3, several, 7, 3))
    for count, token_indices, window, recent in cases:
        q, options = draw(2, 4, count, 20), (token_indices, 0.3, window, recent, PLAIN, count == 1)

        def computed(q, keys, values, options=options):
            found = paged_reference.paged_attention(q, pages._replace(keys=keys, values=values), *options)
            return [x for x in found if x is not None]

        want = right(computed, q, pages.keys, pages.values)
        got = [x for x in paged_attention(q, pages, *options) if x is not None]
        for mine, theirs in zip(got, want, strict=True):
            near(mine, theirs, str(options))
