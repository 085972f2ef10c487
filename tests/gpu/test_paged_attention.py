"""Attention to rows in pages on a card, against each row's attention, or the reference, in float64."""

import pytest
import torch

from ag.kernels.paged_attention import paged_attention, reference
from ag.kernels.pages import Pages
from ag.kernels.softmax import PLAIN, Softmax
from tests.gpu.cases import DEVICE, PAIRS, draw, here, name, scattered
from tests.support.bounds import near, right

pytestmark = pytest.mark.gpu

#: Lengths of the rows of two sequences, queries, query heads of a row, and window and recent; None in their place means
#: one query without token indices, which is weighed.
CASES = {
    "even": ([1000] * 4, 1, 1, None),
    "odd": ([1, 2, 15, 16, 17, 127, 1000, 4097], 1, 8, None),
    "empty": ([0, 45, 8193, 1, 300, 0], 1, 4, None),
    "one-long": ([200_000, 3], 1, 4, None),
    "draft": ([1000, 1, 17, 4097], 5, 4, (None, None)),
    "turn": ([300, 1000], 127, 1, (None, None)),
    "window": ([1000, 300], 65, 8, (200, None)),
    "gates": ([1000, 0, 127, 300], 63, 4, (200, 16)),
    "long": ([200_000, 3], 2, 8, (None, None)),
    "one, window": ([1000, 0, 127, 8193], 1, 4, (200, None)),
    "one, gates": ([1000, 300], 1, 8, (None, 16)),
}


def rows(lengths, group, dim, dtype, count=1):
    """Queries, and their token indices, beside rows in scattered pages, whose tokens are in no order."""
    keys, values, table, held = scattered(lengths, dim, dtype)
    last, queries = int(held.max()), here(count)
    token_indices = torch.randint(max(last, 1), keys.shape[:2], dtype=torch.int32, device=DEVICE)
    gate = torch.rand(keys.shape[:2], device=DEVICE) < 0.3
    q = draw(2, len(lengths) // 2 * group, queries, dim, dtype=dtype)
    at = (torch.arange(queries, device=DEVICE) + last - queries).expand(2, -1)
    return q, Pages(keys, values, token_indices, gate, table, held), at


def exactly(q, pages, *options, softmax=PLAIN, weigh=False):
    """The reference in float64: the output, and the weights of one query."""

    def computed(q, keys, values):
        held = pages._replace(keys=keys, values=values)
        found = reference.paged_attention(q, held, *options, softmax=softmax, weigh=weigh)
        return [x.double() for x in found if x is not None]

    return right(computed, q, pages.keys, pages.values)


def check(what, q, pages, token_indices, masks, softmax=PLAIN):
    """Hold the output, and the weights of a query without token indices, to the reference; twice the same bits."""
    weigh = masks is None
    options = (None, 0.1) if masks is None else (token_indices, 0.1, *masks)
    wanted = exactly(q, pages, *options, softmax=softmax, weigh=weigh)
    got = paged_attention(q, pages, *options, softmax=softmax, weigh=weigh)
    for mine, want in zip(got, wanted, strict=False):
        near(mine, want, what)
    plain, again = (paged_attention(q, pages, *options, softmax=softmax)[0] for _ in range(2))
    near(plain, wanted[0], what)
    assert torch.equal(plain, again)


@pytest.mark.parametrize(("dim", "dtype"), PAIRS, ids=name)
def test_output_and_weights(triton_only, dim, dtype):
    torch.manual_seed(dim)
    for what, (lengths, count, group, masks) in CASES.items():
        check(what, *rows(lengths, group, dim, dtype, count), masks)


@pytest.mark.parametrize(("dim", "dtype"), PAIRS[:2], ids=name)
def test_capped_logits_and_sink_logits(triton_only, dim, dtype):
    torch.manual_seed(dim)
    given = rows(CASES["empty"][0], 4, dim, dtype)
    check("empty", *given, None, Softmax(3.0, torch.linspace(-2, 4, given[0].shape[1], device=DEVICE)))


def test_a_cuda_graph_follows_rows_that_grow(triton_only, card):
    """The grid depends on the table's size alone, so that a captured call sees new lengths, pages and keys."""
    q, pages, _ = rows(CASES["odd"][0], 4, 64, torch.float32)
    lengths = pages.lengths.clone()
    shorter = (lengths - 1).clamp_min(0)
    pages.lengths.copy_(shorter)
    paged_attention(q, pages, None, 0.1, weigh=True)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, weights = paged_attention(q, pages, None, 0.1, weigh=True)
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
    token_indices = torch.zeros(pages, 16, dtype=torch.int32, device=DEVICE)
    q, given = draw(2, 4, 1, dim, dtype=torch.bfloat16), Pages(keys, values, token_indices, None, table, lengths)
    there = table.flatten().long()
    small = Pages(keys[there], values[there], token_indices[there], None, torch.arange(4).view(2, 2).to(table), lengths)
    near(paged_attention(q, given, None, 0.1)[0], exactly(q, small, None, 0.1)[0], "out", keys.dtype)
