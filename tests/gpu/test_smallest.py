"""The smallest case of each Triton kernel: for compute-sanitizer, which makes a launch a hundred times slower.

Lengths are odd, so that every mask is used, and each result is held to its reference.
"""

import pytest
import torch

from ag.kernels.column_max import column_max
from ag.kernels.column_max.reference import reference_column_max
from ag.kernels.column_sums import column_sums
from ag.kernels.column_sums.reference import reference_column_sums
from ag.kernels.gated_attention import gated_attention
from ag.kernels.gated_attention.reference import reference_gated_attention
from ag.kernels.gated_prefill import gated_prefill
from ag.kernels.gated_prefill.reference import reference_gated_prefill
from ag.kernels.paged_attend import paged_attend
from ag.kernels.paged_attend.reference import reference_paged_attend
from ag.kernels.paged_decode import paged_decode, paged_decode_weights
from ag.kernels.paged_decode.reference import reference_paged_decode
from ag.kernels.pages import New, Pages, Reach
from ag.kernels.pool_append import pool_append
from ag.kernels.pool_append.reference import reference_pool_append
from ag.kernels.row_worst import row_worst
from ag.kernels.row_worst.reference import reference_row_worst
from tests.gpu.cases import DEVICE, arguments, draw, exact, near, right, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("triton_untuned")]
SMALL = {"length": 19, "group": 2, "dim": 20, "dtype": torch.float32}


def test_gated_attention():
    tensors, keep, options = arguments(
        **SMALL, padding="left", window=11, recent=2, sinks=1, dense=True, documents=True
    )
    weight = draw(*tensors[0].shape)
    got = run(gated_attention, [*tensors, keep], weight, options)
    want = exact(reference_gated_attention, [*tensors, keep], weight, options)
    for what, mine, theirs in zip(["out", "dq", "dk", "dv", "dkeep"], got, want, strict=True):
        near(mine, theirs, what)


def test_gated_prefill():
    (q, k, v), keep, options = arguments(**SMALL, padding="left", window=11, recent=2, sinks=1)
    (want,) = right(lambda *x: [reference_gated_prefill(*x, keep.bool(), **options)], q, k, v)
    near(gated_prefill(q, k, v, keep.bool(), **options), want, "out")


def test_column_sums():
    (q, k, _), _, options = arguments(**SMALL, padding="left", window=11)
    options |= {"queries": options["key_valid"], "power": 2, "skip": 1, "mean": True}
    (want,) = right(lambda *x: [reference_column_sums(*x, **options)], q, k)
    near(column_sums(q, k, **options), want, "sums")


def test_column_max():
    (q, k, _), _, options = arguments(**SMALL, padding="left", window=11)
    options |= {"queries": options["key_valid"]}
    (want,) = right(lambda *x: [reference_column_max(*x, **options)], q, k)
    near(column_max(q, k, **options), want, "maxima")


def rows_in_pages():
    """Four rows of at most six tokens in pages of 4, and what a scorer recorded of them."""
    table = torch.tensor([[3, 0], [5, 7], [2, 6], [1, 4]], dtype=torch.int32)
    columns = torch.zeros(8, 4, 20), torch.zeros(8, 4, 12), torch.zeros(8, 4).int(), torch.zeros(8, 4).bool()
    pages = [x.to(DEVICE) for x in (*columns, table, torch.zeros(4, dtype=torch.int32))]
    return Pages(*pages), torch.zeros(4, 3, 8, device=DEVICE)


@pytest.mark.parametrize(("reach", "lengths"), [(None, [2, 2, 3, 0]), (Reach(2, 4), [2, 2, 4, 2])])
def test_pool_append(reach, lengths):
    """Two tokens for a sequence and six for the other; later ones come in place of one or two."""
    torch.manual_seed(0)
    (mine, noted), (theirs, wanted) = rows_in_pages(), rows_in_pages()
    for rank in range(6):
        ranks = torch.tensor([rank if rank < 2 else -1, rank], device=DEVICE)
        new = New(draw(2, 2, 20), draw(2, 2, 12), ranks, torch.tensor([[True, False]] * 2, device=DEVICE))
        gone = [[-1, -1], [-1, -1], [1, -1], [0, 1]] if rank > 2 else [[-1, -1]] * 4
        victims = None if reach else torch.tensor(gone, dtype=torch.int32, device=DEVICE)
        pool_append(mine, new, victims, [noted], reach)
        reference_pool_append(theirs, new, victims, [wanted], reach)
        for record in (noted, wanted):
            record += (torch.arange(8, device=DEVICE) < mine.lengths[:, None])[:, None] * (rank + 1)
    assert mine.lengths.tolist() == theirs.lengths.tolist() == lengths
    assert torch.equal(noted, wanted)
    slots = torch.arange(8, device=DEVICE)
    at = (mine.table[:, slots // 4] * 4 + slots % 4)[slots < mine.lengths[:, None]]  # free slots hold anything
    for x, y in zip(mine.columns, theirs.columns, strict=True):
        assert torch.equal(x.flatten(0, 1)[at], y.flatten(0, 1)[at])


def rows_of_tokens():
    """Rows of 0, 1, 6 and 8 tokens; free slots hold no numbers."""
    torch.manual_seed(0)
    pages, _ = rows_in_pages()
    pages.lengths.copy_(torch.tensor([0, 1, 6, 8]))
    slots = torch.arange(8, device=DEVICE)
    at = (pages.table[:, slots // 4] * 4 + slots % 4)[slots < pages.lengths[:, None]]
    for x in (pages.keys, pages.values):
        x.fill_(torch.nan).flatten(0, 1)[at] = draw(15, x.shape[2])
    return pages


def test_paged_decode():
    pages = rows_of_tokens()
    q = draw(2, 4, 1, 20)

    def computed(q, keys, values):
        weights = torch.empty(2, 4, 8, dtype=torch.float64, device=DEVICE)
        return [reference_paged_decode(q, pages._replace(keys=keys, values=values), 0.3, weights), weights]

    mixed, want = right(computed, q, pages.keys, pages.values)
    near(paged_decode(q, pages, 0.3), mixed, "out")
    out, weights = paged_decode_weights(q, pages, 0.3)
    near(out, mixed, "out beside the weights")
    near(weights, want, "weights")


def test_paged_attend():
    pages = rows_of_tokens()
    pages.ranks.copy_(torch.rand(8, 4, device=DEVICE).argsort(-1) * 3)
    pages.gate.copy_(torch.rand(8, 4, device=DEVICE) < 0.5)
    q, ranks = draw(2, 4, 3, 20), torch.tensor([[-1, 5, 6], [7, 8, 9]], device=DEVICE)
    for options in ((0.3, None, None), (0.3, 7, 3)):

        def computed(q, keys, values, options=options):
            return [reference_paged_attend(q, pages._replace(keys=keys, values=values), ranks, *options)]

        (want,) = right(computed, q, pages.keys, pages.values)
        near(paged_attend(q, pages, ranks, *options), want, "out")


def test_row_worst():
    torch.manual_seed(0)
    score = torch.randint(3, (2, 2, 19), device=DEVICE).float()
    protected, valid = (torch.rand(2, 2, 19, device=DEVICE) < share for share in (0.3, 0.8))
    for ranks in (None, torch.rand(2, 2, 19, device=DEVICE).argsort(-1).int()):
        found, want = (find(score, protected, valid, ranks) for find in (row_worst, reference_row_worst))
        for mine, theirs in zip(found, want, strict=True):
            assert torch.equal(mine, theirs)
