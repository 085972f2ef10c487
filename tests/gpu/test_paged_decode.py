"""Decoding over rows in pages on a card, against each row's attention in float64."""

import pytest
import torch

from ag.kernels.paged_decode import paged_decode, paged_decode_weights
from ag.kernels.pages import Pages
from ag.kernels.softmax import PLAIN, Softmax, weigh
from tests.gpu.cases import DEVICE, PAIRS, draw, name, near, right, scattered

pytestmark = pytest.mark.gpu

ROWS = {  # of two sequences
    "even": [1000] * 4,
    "odd": [1, 2, 15, 16, 17, 127, 1000, 4097],
    "empty": [0, 45, 8193, 1, 300, 0],
    "one-long": [200_000, 3],
}


def rows(lengths, group, dim, dtype):
    """Queries beside rows in scattered pages."""
    keys, values, table, held = scattered(lengths, dim, dtype)
    ranks = torch.zeros(keys.shape[:2], dtype=torch.int32, device=DEVICE)
    q = draw(2, len(lengths) // 2 * group, 1, dim, dtype=dtype)
    return q, Pages(keys, values, ranks, None, table, held)


def by_row(q, pages, scaling, softmax=PLAIN):
    """The outputs, and the weights by slot, in float64."""

    table, lengths = pages.table, pages.lengths

    def computed(q, *columns):
        queries = q.view(len(table), -1, q.shape[-1])
        out, weights = torch.zeros_like(queries), queries.new_zeros(*queries.shape[:2], table.shape[1] * 16)
        for row, count in enumerate(lengths.tolist()):
            k, v = (x[row, :count] for x in columns)
            s = softmax.capped(queries[row] @ k.T * scaling)
            sinks = softmax.by_row(*queries.shape[:2])
            weights[row, :, :count] = weigh(s, None if sinks is None else sinks[row, :, None])
            out[row] = weights[row, :, :count] @ v
        return out.view(q.shape), weights.view(*q.shape[:2], -1)

    return right(computed, q, *(x[table.long().clamp_min(0)].flatten(1, 2) for x in (pages.keys, pages.values)))


@pytest.mark.parametrize(("dim", "dtype"), PAIRS, ids=name)
def test_output_and_weights(triton_untuned, dim, dtype):
    torch.manual_seed(dim)
    for (what, lengths), group in zip(ROWS.items(), (1, 8, 4, 4), strict=True):
        given = rows(lengths, group, dim, dtype)
        wanted, shares = by_row(*given, 0.1)
        got = paged_decode(*given, 0.1)
        near(got, wanted, what, got.dtype)
        assert torch.equal(got, paged_decode(*given, 0.1))
        out, weights = paged_decode_weights(*given, 0.1)
        near(out, wanted, f"{what}, beside the weights", got.dtype)
        near(weights, shares, f"{what}, weights")


@pytest.mark.parametrize(("dim", "dtype"), PAIRS[:2], ids=name)
def test_capped_logits_and_sink_logits(triton_untuned, dim, dtype):
    torch.manual_seed(dim)
    given = rows(ROWS["empty"], 4, dim, dtype)
    softmax = Softmax(3.0, torch.linspace(-2, 4, given[0].shape[1], device=DEVICE))
    wanted, shares = by_row(*given, 0.1, softmax)
    out, weights = paged_decode_weights(*given, 0.1, softmax)
    near(out, wanted, "output", out.dtype)
    near(weights, shares, "weights")


def test_nothing_waits_for_the_card(triton_untuned, card):
    given = rows(ROWS["odd"], 4, 64, torch.bfloat16)
    want = paged_decode_weights(*given, 0.1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = paged_decode_weights(*given, 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_a_cuda_graph_follows_rows_that_grow(triton_untuned, card):
    """The grid depends on the table's size alone, so that a captured call sees new lengths, pages and keys."""
    q, pages = rows(ROWS["odd"], 4, 64, torch.float32)
    lengths = pages.lengths.clone()
    shorter = (lengths - 1).clamp_min(0)
    pages.lengths.copy_(shorter)
    paged_decode_weights(q, pages, 0.1)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, weights = paged_decode_weights(q, pages, 0.1)
    for now in (shorter, lengths):
        pages.lengths.copy_(now)
        q.normal_()
        graph.replay()
        wanted, shares = by_row(q, pages, 0.1)
        near(out, wanted, "replayed")
        near(weights, shares, "replayed weights")


def test_a_pool_of_more_than_2_31_elements(triton_untuned, card):
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
    near(paged_decode(*given, 0.1), by_row(*given, 0.1)[0], "out", keys.dtype)
