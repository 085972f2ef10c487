"""Several new tokens against rows in pages on a card, against the reference in float64."""

import pytest
import torch

from ag.kernels.paged_attend import paged_attend
from ag.kernels.paged_attend.reference import reference_paged_attend
from ag.kernels.pages import Pages
from tests.gpu.cases import DEVICE, PAIRS, draw, here, name, near, right, scattered

pytestmark = pytest.mark.gpu

CASES = {  # lengths of the rows of two sequences, queries, heads of a row, window, recent
    "draft": ([1000, 1, 17, 4097], 5, 4, None, None),
    "turn": ([300, 1000], 127, 1, None, None),
    "window": ([1000, 300], 65, 8, 200, None),
    "gates": ([1000, 0, 127, 300], 63, 4, 200, 16),
    "long": ([200_000, 3], 2, 8, None, None),
}


def rows(lengths, count, group, dim, dtype):
    """Queries and their ranks beside rows in scattered pages, whose tokens are in no order."""
    keys, values, table, held = scattered(lengths, dim, dtype)
    last, queries = int(held.max()), here(count)
    ranks = torch.randint(last, keys.shape[:2], dtype=torch.int32, device=DEVICE)
    gate = torch.rand(keys.shape[:2], device=DEVICE) < 0.3
    pages = Pages(keys, values, ranks, gate, table, held)
    q = draw(2, len(lengths) // 2 * group, queries, dim, dtype=dtype)
    return q, pages, (torch.arange(queries, device=DEVICE) + last - queries).expand(2, -1)


def by_reference(q, pages, *options):
    """The reference in float64."""

    def computed(q, keys, values):
        return [reference_paged_attend(q, pages._replace(keys=keys, values=values), *options)]

    return right(computed, q, pages.keys, pages.values)[0]


@pytest.mark.parametrize(("dim", "dtype"), PAIRS, ids=name)
def test_output(triton_untuned, dim, dtype):
    torch.manual_seed(dim)
    for what, (lengths, count, group, window, recent) in CASES.items():
        q, pages, ranks = rows(lengths, count, group, dim, dtype)
        want = by_reference(q, pages, ranks, 0.1, window, recent)
        near(paged_attend(q, pages, ranks, 0.1, window, recent), want, what, q.dtype)


def test_nothing_waits_for_the_card(triton_untuned, card):
    q, pages, ranks = rows(*CASES["gates"][:3], 64, torch.bfloat16)
    want = paged_attend(q, pages, ranks, 0.1, 200, 16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = paged_attend(q, pages, ranks, 0.1, 200, 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)
