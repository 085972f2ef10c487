"""The smallest case of each Triton kernel: for compute-sanitizer, which makes a launch a hundred times slower.

Lengths are odd, so that every mask is used, and each result is held to its reference.
"""

import pytest
import torch
from rows_by_hand import check_weights

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
from ag.kernels.pages import New, Pages
from ag.kernels.pool_append import pool_append
from ag.kernels.pool_append.reference import reference_pool_append
from ag.kernels.pool_expired import pool_expired
from ag.kernels.pool_expired.reference import reference_pool_expired
from ag.kernels.ragged_decode import ragged_decode, ragged_decode_weights
from ag.kernels.ragged_decode.reference import reference_ragged_decode
from ag.kernels.ring_append import ring_append
from ag.kernels.ring_append.reference import reference_ring_append
from ag.kernels.row_worst import row_worst
from ag.kernels.row_worst.reference import reference_row_worst
from gpu.cases import DEVICE, arguments, draw, exact, near, run

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
        near(mine, theirs, 1e-4, what)


def test_gated_prefill():
    (q, k, v), keep, options = arguments(**SMALL, padding="left", window=11, recent=2, sinks=1)
    want = reference_gated_prefill(q.double(), k.double(), v.double(), keep.bool(), **options)
    near(gated_prefill(q, k, v, keep.bool(), **options), want, 1e-4, "out")


def test_column_sums():
    (q, k, _), _, options = arguments(**SMALL, padding="left", window=11)
    options |= {"queries": options["key_valid"], "power": 2, "skip": 1, "mean": True}
    want = reference_column_sums(q.double(), k.double(), **options)
    near(column_sums(q, k, **options), want, 1e-4, "sums")


def test_column_max():
    (q, k, _), _, options = arguments(**SMALL, padding="left", window=11)
    options |= {"queries": options["key_valid"]}
    want = reference_column_max(q.double(), k.double(), **options)
    near(column_max(q, k, **options), want, 1e-4, "maxima")


def test_ragged_decode():
    torch.manual_seed(0)
    q, keys, values = draw(2, 2, 20), draw(70, 20), draw(70, 20)
    starts, lengths = torch.tensor([3, 40], device=DEVICE), torch.tensor([37, 19], device=DEVICE)
    want = reference_ragged_decode(q.double(), keys.double(), values.double(), starts, lengths, 0.3)
    near(ragged_decode(q, keys, values, starts, lengths, 0.3), want, 1e-4, "out")
    out, weights = ragged_decode_weights(q, keys, values, starts, lengths, 0.3, 37)
    check_weights(weights, out, q, keys, values, starts, lengths, 0.3)


def test_ring_append():
    """Two tokens for a sequence and six for the other; one head keeps what leaves the ring, one nothing."""
    torch.manual_seed(0)
    room, ring, window = 7, 3, 4
    starts = torch.arange(4, device=DEVICE) * (room + 2) + 1
    size = 4 * (room + 2) + 1

    def empty():
        held = {"keys": torch.zeros(size, 20), "values": torch.zeros(size, 12), "ranks": torch.zeros(size).int()}
        held |= {"flags": torch.zeros(size).bool(), "lengths": torch.zeros(4).long()}
        return {name: x.to(DEVICE) for name, x in held.items()}

    mine, theirs = empty(), empty()
    for rank in range(6):
        new = {"new_keys": draw(2, 2, 20), "new_values": draw(2, 2, 12)}
        new["new_flags"] = torch.tensor([[True, False]] * 2, device=DEVICE)
        new["new_ranks"] = torch.tensor([rank if rank < 2 else -1, rank], device=DEVICE)
        for append, held in ((ring_append, mine), (reference_ring_append, theirs)):
            append(**held, **new, starts=starts, ring=ring, window=window)
    assert mine["lengths"].tolist() == theirs["lengths"].tolist() == [2, 2, 4, 3]
    rows = [slice(a, a + n) for a, n in zip(starts.tolist(), mine["lengths"].tolist(), strict=True)]
    assert [sorted(mine["ranks"][row].tolist()) for row in rows] == [[0, 1], [0, 1], [2, 3, 4, 5], [3, 4, 5]]
    for name in ("keys", "values", "ranks", "flags"):
        assert all(torch.equal(mine[name][row], theirs[name][row]) for row in rows), name


def rows_in_pages():
    """Four rows of at most six tokens in pages of 4, and what a scorer recorded of them."""
    table = torch.tensor([[3, 0], [5, 7], [2, 6], [1, 4]], dtype=torch.int32)
    columns = torch.zeros(8, 4, 20), torch.zeros(8, 4, 12), torch.zeros(8, 4).int(), torch.zeros(8, 4).bool()
    pages = [x.to(DEVICE) for x in (*columns, table, torch.zeros(4, dtype=torch.int32))]
    return Pages(*pages), torch.zeros(4, 3, 8, device=DEVICE)


def test_pool_append():
    """Two tokens for a sequence and six for the other; later ones come in place of one or two."""
    torch.manual_seed(0)
    (mine, noted), (theirs, wanted) = rows_in_pages(), rows_in_pages()
    for rank in range(6):
        ranks = torch.tensor([rank if rank < 2 else -1, rank], device=DEVICE)
        new = New(draw(2, 2, 20), draw(2, 2, 12), ranks, torch.tensor([[True, False]] * 2, device=DEVICE))
        gone = [[-1, -1], [-1, -1], [1, -1], [0, 1]] if rank > 2 else [[-1, -1]] * 4
        victims = torch.tensor(gone, dtype=torch.int32, device=DEVICE)
        pool_append(mine, new, victims, [noted])
        reference_pool_append(theirs, new, victims, [wanted])
        for record in (noted, wanted):
            record += (torch.arange(8, device=DEVICE) < mine.lengths[:, None])[:, None] * (rank + 1)
    assert mine.lengths.tolist() == theirs.lengths.tolist() == [2, 2, 3, 0]
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
    q, want = draw(2, 4, 1, 20), torch.empty(2, 4, 8, dtype=torch.float64, device=DEVICE)
    rest = pages.table, pages.lengths, 0.3
    mixed = reference_paged_decode(q.double(), pages.keys.double(), pages.values.double(), *rest, want)
    near(paged_decode(q, pages.keys, pages.values, *rest), mixed, 1e-4, "out")
    out, weights = paged_decode_weights(q, pages.keys, pages.values, *rest)
    near(out, mixed, 1e-4, "out beside the weights")
    near(weights, want, 1e-4, "weights")


def test_paged_attend():
    pages = rows_of_tokens()
    pages.ranks.copy_(torch.rand(8, 4, device=DEVICE).argsort(-1) * 3)
    pages.gate.copy_(torch.rand(8, 4, device=DEVICE) < 0.5)
    q, ranks = draw(2, 4, 3, 20), torch.tensor([[-1, 5, 6], [7, 8, 9]], device=DEVICE)
    exact = pages._replace(keys=pages.keys.double(), values=pages.values.double())
    for window, recent in ((None, None), (7, 3)):
        want = reference_paged_attend(q.double(), exact, ranks, 0.3, window, recent)
        near(paged_attend(q, pages, ranks, 0.3, window, recent), want, 1e-4, "out")


def test_pool_expired():
    torch.manual_seed(0)
    pages, _ = rows_in_pages()
    pages.ranks.copy_(torch.randint(9, pages.ranks.shape))
    pages.lengths.copy_(torch.tensor([0, 3, 6, 8]))
    for new in ([4, 9], [-1, 8]):
        ranks = torch.tensor(new, device=DEVICE)
        for recent, window in ((2, 5), (None, 4), (3, 3)):
            assert torch.equal(
                pool_expired(pages, ranks, recent, window), reference_pool_expired(pages, ranks, recent, window)
            )


def test_row_worst():
    torch.manual_seed(0)
    score = torch.randint(3, (2, 2, 19), device=DEVICE).float()
    protected, valid = (torch.rand(2, 2, 19, device=DEVICE) < share for share in (0.3, 0.8))
    for ranks in (None, torch.rand(2, 2, 19, device=DEVICE).argsort(-1).int()):
        found, want = (find(score, protected, valid, ranks) for find in (row_worst, reference_row_worst))
        for mine, theirs in zip(found, want, strict=True):
            assert torch.equal(mine, theirs)
