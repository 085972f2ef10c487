"""Decoding over ragged rows on a card, against each row's attention in float64."""

from itertools import product

import pytest
import torch
from rows_by_hand import check_weights

from ag.kernels.ragged_decode import flash, ragged_decode_weights
from ag.kernels.ragged_decode.chunked import chunked_ragged_decode
from gpu.cases import DEVICE, DIMS, DTYPES, PRECISIONS, REHEARSAL, draw, here, name, near

pytestmark = pytest.mark.gpu


def triton_ragged_decode(*arguments):
    """Call the kernel; Triton is imported where a test runs."""
    from ag.kernels.ragged_decode.triton import triton_ragged_decode as decode

    return decode(*arguments)


ROWS = {  # of two sequences
    "even": [1000] * 4,
    "odd": [1, 2, 63, 64, 65, 127, 1000, 4097],
    "empty": [0, 45, 8193, 1, 300, 0],
    "one-long": [200_000, 3],
}


def storage(lengths, group, dim, dtype):
    """Rows with free slots, which hold no numbers, between them."""
    counts = torch.tensor([here(count) for count in lengths])
    starts = (counts + 5).cumsum(0) - counts
    keys, values = (torch.full((int(counts.sum()) + 5 * len(counts) + 5, dim), torch.nan, device=DEVICE) for _ in "kv")
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        for x in (keys, values):
            x[start : start + count] = torch.randn(count, dim, device=DEVICE)
    q = draw(2, len(counts) // 2 * group, dim, dtype=dtype)
    return q, keys.to(q.dtype), values.to(q.dtype), starts.to(DEVICE), counts.to(DEVICE)


def by_row(q, keys, values, starts, lengths, scaling):
    rows = q.double().view(len(starts), -1, q.shape[-1])
    want = torch.zeros_like(rows)
    for row, (start, count) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        k, v = (x[start : start + count].double() for x in (keys, values))
        want[row] = (rows[row] @ k.T * scaling).softmax(-1) @ v
    return want.view(q.shape)


# a rehearsal has one type a head size
PAIRS = list(zip(DIMS, DTYPES * 3, strict=False)) if REHEARSAL else list(product(DIMS, DTYPES))


@pytest.mark.parametrize(("dim", "dtype"), PAIRS, ids=name)
def test_output(triton_untuned, dim, dtype):
    torch.manual_seed(dim)
    for (rows, lengths), group in zip(ROWS.items(), (1, 8, 4, 4), strict=True):
        given = storage(lengths, group, dim, dtype)
        longest = int(given[-1].max())
        got = triton_ragged_decode(*given, 0.1)
        near(got, by_row(*given, 0.1), PRECISIONS[dtype], rows)
        assert torch.equal(got, triton_ragged_decode(*given, 0.1))
        out, weights = ragged_decode_weights(*given, 0.1, longest)
        check_weights(weights, out, *given, 0.1)
        if flash.unavailable(*given[:3]) is None:
            found = flash.flash_ragged_decode(*given, 0.1, longest)
            near(found, by_row(*given, 0.1), PRECISIONS[dtype], f"{rows}, flash")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_plain_torch(dtype):
    for lengths in ROWS.values():
        given = storage(lengths, 4, 64, dtype)
        near(chunked_ragged_decode(*given, 0.1), by_row(*given, 0.1), PRECISIONS[dtype], str(lengths))


def test_nothing_waits_for_the_card(triton_untuned, card):
    given = storage(ROWS["odd"], 4, 64, torch.bfloat16)
    want = triton_ragged_decode(*given, 0.1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = triton_ragged_decode(*given, 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)


def test_a_cuda_graph_follows_rows_that_grow(triton_untuned, card):
    """The grid depends on the buffer alone, so that a captured call sees new lengths, keys and values."""
    q, keys, values, starts, lengths = storage(ROWS["odd"], 4, 64, torch.float32)
    shorter = (lengths - 1).clamp_min(0)
    held = shorter.clone()
    triton_ragged_decode(q, keys, values, starts, held, 0.1)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_ragged_decode(q, keys, values, starts, held, 0.1)
    for now in (shorter, lengths):
        held.copy_(now)
        q.normal_()
        graph.replay()
        near(out, by_row(q, keys, values, starts, now, 0.1), 1e-4, "replayed")


def test_a_buffer_of_more_than_2_31_elements(triton_untuned, card):
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GB of free memory")
    slots, dim = 2**31 // 128 + 4096, 128
    keys, values = (torch.empty(slots, dim, dtype=torch.bfloat16, device=DEVICE) for _ in "kv")
    starts, lengths = torch.tensor([7, slots - 999], device=DEVICE), torch.tensor([100, 999], device=DEVICE)
    for x in (keys, values):
        x[7:107].normal_()
        x[-999:].normal_()
    q = draw(2, 4, dim, dtype=torch.bfloat16)
    near(
        triton_ragged_decode(q, keys, values, starts, lengths, 0.1),
        by_row(q, keys, values, starts, lengths, 0.1),
        2e-2,
        "out",
    )
