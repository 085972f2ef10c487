"""Several new tokens against rows in pages: every version against attention by hand."""

import pytest
import torch

from ag.kernels.paged_attend import cpu, paged_attend
from ag.kernels.paged_attend.reference import BLOCK, reference_paged_attend
from ag.kernels.softmax import PLAIN
from tests.support.bounds import bounded, hold
from tests.support.compiled import needs
from tests.support.paged import check_threads_and_pages, filled, places, read, tokens

SCALING = 0.3
needs_compiler = needs(cpu.KERNEL)
VERSIONS = [
    pytest.param(reference_paged_attend, id="reference"),
    pytest.param(cpu.paged_attend, id="cpp", marks=needs_compiler),
]


def given(lengths, heads, count, *, batch=1, window=None, recent=None, ordered=False, dtype=torch.float32, **options):
    """Return the arguments: rows whose tokens lie in any order unless told, and queries of the newest ranks.

    Some ranks are missing in each row, those of queries too, as they are where every step evicts.
    """
    q, pages = filled(lengths, heads, batch, dtype=dtype, gate=torch.bool, **options)
    generator = torch.Generator().manual_seed(sum(lengths))
    last = max(lengths) + 5
    for row, length in enumerate(lengths):
        held = torch.randperm(last, generator=generator)[:length]
        pages.ranks.flatten()[places(pages, row)] = (held.sort().values if ordered else held).int()
        pages.gate.flatten()[places(pages, row)] = torch.rand(length, generator=generator) < 0.3
    q = torch.randn(batch, heads, count, q.shape[-1], generator=generator).to(dtype) * 2
    ranks = torch.arange(last - count, last).expand(batch, -1).clone()
    return q, pages, ranks, SCALING, window, recent


def visible(pages, row, at, window, recent):
    """Tell which tokens of a row the queries of ranks ``at`` see, ``[T, n]`` bool, one by one."""
    ranks, gates = read(pages, pages.ranks, row).tolist(), read(pages, pages.gate, row).tolist()
    seen = [
        [
            rank <= own and (window is None or own - rank < window) and (recent is None or own - rank < recent or gate)
            for rank, gate in zip(ranks, gates, strict=True)
        ]
        for own in at.tolist()
    ]
    return torch.tensor(seen, dtype=torch.bool).view(len(at), len(ranks))


def check(version, q, pages, ranks, scaling, window, recent, dtype=torch.float32, softmax=PLAIN):
    """Hold a version to float64, query by query; those that see nothing get 0."""
    got = version(q, pages, ranks, scaling, window, recent, softmax)
    assert got.shape == (*q.shape[:3], pages.channels[1]) and got.dtype == q.dtype
    rows = len(pages.table)
    by_row = got.reshape(rows, -1, *got.shape[2:])
    for row, queries in enumerate(q.reshape(rows, -1, *q.shape[2:])):
        k, v = tokens(pages, row, dtype)
        at = ranks[row * len(ranks) // rows]
        seen = visible(pages, row, at, window, recent)
        for g in range(len(queries)):
            s = bounded(queries[g], dtype) @ k.T * scaling
            s = s if softmax.cap is None else (s / softmax.cap).tanh() * softmax.cap
            s = s.masked_fill(~seen, float("-inf"))
            if softmax.sinks is not None:
                sink = bounded(softmax.sinks[(row * len(queries) + g) % len(softmax.sinks)], dtype)
                s = torch.cat([s, sink.expand(len(s), 1)], 1)
            some = seen.any(1)
            assert not by_row[row, g, ~some].any()
            if some.any():
                hold(by_row[row, g, some], s[some].softmax(-1)[:, : len(v)] @ v, name=(row, g))


CASES = {
    "two": {"lengths": [40, 7], "heads": 2, "count": 2},
    "empty_row": {"lengths": [0, 100, 1], "heads": 6, "count": 3},
    "page_borders": {"lengths": [15, 16, 17, 31, 32, 33], "heads": 6, "count": 5, "batch": 3},
    "tile_borders": {"lengths": [63, 64, 65, 129], "heads": 4, "count": 17, "batch": 2},
    "window": {"lengths": [200, 90], "heads": 6, "count": 30, "window": 40},
    "recent": {"lengths": [200, 90], "heads": 6, "count": 30, "recent": 6},
    "window_and_recent": {"lengths": [150, 90], "heads": 4, "count": 9, "window": 50, "recent": 6, "batch": 2},
    "ordered": {"lengths": [300, 80], "heads": 2, "count": 60, "ordered": True, "scattered": False},
    "ordered_window": {"lengths": [300, 80], "heads": 2, "count": 60, "ordered": True, "window": 30},
    "pages_of_5": {"lengths": [70, 4, 5, 6], "heads": 8, "count": 4, "page": 5},
    "G1-D60": {"lengths": [33, 90], "heads": 2, "count": 12, "dim": 60},
    "G7-D80-Dv48": {"lengths": [59, 20], "heads": 14, "count": 11, "dim": 80, "width": 48},
    "D128": {"lengths": [59, 20], "heads": 4, "count": 40, "dim": 128},
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_version_equals_attention_by_hand(version, case):
    check(version, *given(**{"dim": 64, **case}))


@pytest.mark.parametrize("version", VERSIONS)
def test_padding_sees_nothing(version):
    arguments = given([40, 30, 9, 20], 4, 5, batch=2, dim=16)
    arguments[2][0, :2] = -1
    check(version, *arguments)


@pytest.mark.parametrize("version", VERSIONS)
def test_more_queries_than_a_block(version):
    arguments = given([700], 1, BLOCK + 13, dim=8, ordered=True)
    check(version, *arguments)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [60, 128])
def test_half_precision_is_summed_in_float32(version, dtype, dim):
    check(version, *given([70, 1, 130], 6, 7, dim=dim, dtype=dtype))


@needs_compiler
def test_cpp_depends_neither_on_threads_nor_on_where_pages_lie():
    q, pages, *others = given([400, 30, 170], 6, 50, dim=64, window=200, recent=20)
    check_threads_and_pages(lambda pages: cpu.paged_attend(q, pages, *others), pages)


def test_float64_is_left_to_pytorch_and_a_gate_is_not_needed(fresh):
    q, pages, *others = given([40, 9], 2, 3, dim=16, dtype=torch.float64)
    check(paged_attend, q, pages, *others, dtype=torch.float64)
    without = paged_attend(q, pages._replace(gate=None), *others)
    assert torch.equal(without, paged_attend(q, pages, *others))
