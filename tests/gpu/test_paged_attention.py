"""Attention to rows in pages on a card, against each row's attention, or the reference, in float64."""

import pytest
import torch

from ag.kernels.paged_attention import paged_attention, reference
from ag.kernels.pages import Pages
from ag.kernels.softmax import PLAIN, Softmax
from tests.gpu.cases import DEVICE, PAIRS, draw, here, name, scattered
from tests.support.bounds import near, right

pytestmark = pytest.mark.gpu

ROWS = {  # of two sequences, of one new token each
    "even": [1000] * 4,
    "odd": [1, 2, 15, 16, 17, 127, 1000, 4097],
    "empty": [0, 45, 8193, 1, 300, 0],
    "one-long": [200_000, 3],
}


#: Lengths of the rows of two sequences, queries, heads of a row, window, recent.
CASES = {
    "draft": ([1000, 1, 17, 4097], 5, 4, None, None),
    "turn": ([300, 1000], 127, 1, None, None),
    "window": ([1000, 300], 65, 8, 200, None),
    "gates": ([1000, 0, 127, 300], 63, 4, 200, 16),
    "long": ([200_000, 3], 2, 8, None, None),
    "one, window": ([1000, 0, 127, 8193], 1, 4, 200, None),
    "one, gates": ([1000, 300], 1, 8, None, 16),
}


def rows(lengths, group, dim, dtype, count=1):
    """Queries, and their ranks, beside rows in scattered pages, whose tokens are in no order."""
    keys, values, table, held = scattered(lengths, dim, dtype)
    last, queries = int(held.max()), here(count)
    ranks = torch.randint(max(last, 1), keys.shape[:2], dtype=torch.int32, device=DEVICE)
    gate = torch.rand(keys.shape[:2], device=DEVICE) < 0.3
    q = draw(2, len(lengths) // 2 * group, queries, dim, dtype=dtype)
    at = (torch.arange(queries, device=DEVICE) + last - queries).expand(2, -1)
    return q, Pages(keys, values, ranks, gate, table, held), at


def weighed(q, pages, scaling, softmax=PLAIN):
    """What one query gets that sees all that is held, and its weights."""
    return paged_attention(q, pages, None, scaling, softmax=softmax, weigh=True)


def exactly(q, pages, *options, softmax=PLAIN, weigh=False):
    """The reference in float64: the output, and the weights of one query."""

    def computed(q, keys, values):
        held = pages._replace(keys=keys, values=values)
        found = reference.paged_attention(q, held, *options, softmax=softmax, weigh=weigh)
        return [x.double() for x in found if x is not None]

    return right(computed, q, pages.keys, pages.values)


@pytest.mark.parametrize(("dim", "dtype"), PAIRS, ids=name)
def test_output_and_weights(triton_only, dim, dtype):
    torch.manual_seed(dim)
    for (what, lengths), group in zip(ROWS.items(), (1, 8, 4, 4), strict=True):
        given = rows(lengths, group, dim, dtype)[:2]
        wanted, shares = exactly(*given, None, 0.1, weigh=True)
        got, _ = paged_attention(*given, None, 0.1)
        near(got, wanted, what, got.dtype)
        assert torch.equal(got, paged_attention(*given, None, 0.1)[0])
        out, weights = weighed(*given, 0.1)
        near(out, wanted, f"{what}, beside the weights", got.dtype)
        near(weights, shares, f"{what}, weights")


@pytest.mark.parametrize(("dim", "dtype"), PAIRS[:2], ids=name)
def test_capped_logits_and_sink_logits(triton_only, dim, dtype):
    torch.manual_seed(dim)
    given = rows(ROWS["empty"], 4, dim, dtype)[:2]
    softmax = Softmax(3.0, torch.linspace(-2, 4, given[0].shape[1], device=DEVICE))
    wanted, shares = exactly(*given, None, 0.1, softmax=softmax, weigh=True)
    out, weights = weighed(*given, 0.1, softmax)
    near(out, wanted, "output", out.dtype)
    near(weights, shares, "weights")


@pytest.mark.parametrize(("dim", "dtype"), PAIRS, ids=name)
def test_output_behind_masks(triton_only, dim, dtype):
    torch.manual_seed(dim)
    for what, (lengths, count, group, window, recent) in CASES.items():
        q, pages, ranks = rows(lengths, group, dim, dtype, count)
        (want,) = exactly(q, pages, ranks, 0.1, window, recent)
        near(paged_attention(q, pages, ranks, 0.1, window, recent)[0], want, what, q.dtype)


def test_a_cuda_graph_follows_rows_that_grow(triton_only, card):
    """The grid depends on the table's size alone, so that a captured call sees new lengths, pages and keys."""
    q, pages, _ = rows(ROWS["odd"], 4, 64, torch.float32)
    lengths = pages.lengths.clone()
    shorter = (lengths - 1).clamp_min(0)
    pages.lengths.copy_(shorter)
    weighed(q, pages, 0.1)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, weights = weighed(q, pages, 0.1)
    for now in (shorter, lengths):
        pages.lengths.copy_(now)
        q.normal_()
        graph.replay()
        wanted, shares = exactly(q, pages, None, 0.1, weigh=True)
        near(out, wanted, "replayed")
        near(weights, shares, "replayed weights")


def test_a_pool_of_more_than_2_31_elements(triton_only, card):
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GB of free memory")
    pages, dim = 2**31 // 2048 + 256, 128
    keys, values = (torch.empty(pages, 16, dim, dtype=torch.bfloat16, device=DEVICE) for _ in "kv")
    table = torch.tensor([[7, pages - 1], [pages - 2, 0]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([32, 9], dtype=torch.int32, device=DEVICE)
    for x in (keys, values):
        x[table.long()] = torch.randn(2, 2, 16, dim, device=DEVICE).bfloat16()
    ranks = torch.zeros(pages, 16, dtype=torch.int32, device=DEVICE)
    given = draw(2, 4, 1, dim, dtype=torch.bfloat16), Pages(keys, values, ranks, None, table, lengths)
    near(paged_attention(*given, None, 0.1)[0], exactly(*given, None, 0.1)[0], "out", keys.dtype)
