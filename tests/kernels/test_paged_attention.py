"""Attention to rows in pages: every version against attention by hand, and what happens without a compiler."""

import logging
import shutil

import pytest
import torch

from ag.errors import UserError
from ag.kernels.paged_attention import cpu, paged_attention
from ag.kernels.paged_attention.reference import BLOCK, reference_paged_attention
from ag.kernels.pages import Pages
from ag.kernels.softmax import PLAIN
from tests.support.bounds import bounded, hold
from tests.support.compiled import needs
from tests.support.paged import attended, check_threads_and_pages, filled, hold_rows, places, read, tokens

SCALING = 0.3
needs_compiler = needs(cpu.KERNEL)
VERSIONS = [
    pytest.param(reference_paged_attention, id="reference"),
    pytest.param(cpu.paged_attention, id="cpp", marks=needs_compiler),
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
    """Hold a version to float64, query by query; those that see nothing get 0. Of one query the weights too."""
    weigh = q.shape[2] == 1
    got, weights = version(q, pages, ranks, scaling, window, recent, softmax, weigh)
    assert got.shape == (*q.shape[:3], pages.channels[1]) and got.dtype == q.dtype and (weights is None) != weigh
    rows = len(pages.table)
    by_row, shares = got.reshape(rows, -1, *got.shape[2:]), []
    for row, queries in enumerate(q.reshape(rows, -1, *q.shape[2:])):
        k, v = tokens(pages, row, dtype)
        at = ranks[row * len(ranks) // rows]
        seen = visible(pages, row, at, window, recent)
        some = seen.any(1)
        for g in range(len(queries)):
            s = bounded(queries[g], dtype) @ k.T * scaling
            s = s if softmax.cap is None else (s / softmax.cap).tanh() * softmax.cap
            s = s.masked_fill(~seen, float("-inf"))
            if softmax.sinks is not None:
                sink = bounded(softmax.sinks[(row * len(queries) + g) % len(softmax.sinks)], dtype)
                s = torch.cat([s, sink.expand(len(s), 1)], 1)
            assert not by_row[row, g, ~some].any()
            if some.any():
                shares.append((row, g, s[some].softmax(-1)[:, : len(v)]))
                hold(by_row[row, g, some], shares[-1][2] @ v, name=(row, g))
    if weigh:
        assert weights.dtype == torch.float32
        weights = weights.view(rows, -1, pages.table.shape[1] * pages.keys.shape[1]).clone()
        for row, g, share in shares:
            hold(weights[row, g, : share.shape[1]], share[0], name=("weights", row, g))
            weights[row, g, : share.shape[1]] = 0
        assert not weights.any()


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
CASES |= {
    f"one-{name}": {"count": 1, **case}
    for name, case in {
        "token": {"lengths": [1, 1], "heads": 6},
        "chunk_borders": {"lengths": [255, 256, 257, 513], "heads": 8},
        "uneven_batch": {"lengths": [1000, 3, 41, 640, 77, 0], "heads": 6, "batch": 3},
        "window": {"lengths": [700, 90, 3], "heads": 9, "window": 40},
        "ordered_window": {"lengths": [700, 300], "heads": 4, "window": 40, "ordered": True, "scattered": False},
        "recent": {"lengths": [700, 90, 0], "heads": 9, "recent": 6},
        "window_and_recent": {"lengths": [300, 90], "heads": 10, "window": 50, "recent": 6, "batch": 2},
        "pages_of_5": {"lengths": [270, 4, 5, 6], "heads": 4, "page": 5, "window": 100},
        "G7-D80-Dv48": {"lengths": [259, 20], "heads": 14, "dim": 80, "width": 48, "recent": 20},
    }.items()
}
#: Of one query that sees all that is held.
HELD = {
    "one_token": {"lengths": [1, 1], "heads": 6},
    "empty_row": {"lengths": [0, 7, 300], "heads": 9},
    "nothing": {"lengths": [0, 0], "heads": 2},
    "no_pages": {"lengths": [0, 0], "heads": 2, "spare": 0},
    "page_borders": {"lengths": [0, 1, 15, 16, 17, 33], "heads": 9, "batch": 2},
    "chunk_borders": {"lengths": [255, 256, 257, 513], "heads": 8},
    "uneven_batch": {"lengths": [1000, 3, 41, 640, 77, 0], "heads": 6, "batch": 3},
    "consecutive": {"lengths": [1000, 30, 513, 16], "heads": 4, "scattered": False},
    "pages_of_5": {"lengths": [270, 4, 5, 6], "heads": 4, "page": 5},
    "G1-D60": {"lengths": [33, 290], "heads": 2, "dim": 60},
    "G8-D128": {"lengths": [259, 2], "heads": 16, "dim": 128},
    "G7-D80-Dv48": {"lengths": [259, 20], "heads": 14, "dim": 80, "width": 48},
}


def weighed(version, q, pages, scaling=SCALING, softmax=PLAIN):
    """Return what one query that sees all that is held gets, and its weights."""
    return version(q, pages, None, scaling, softmax=softmax, weigh=True)


def check_held(version, q, pages, scaling=SCALING, dtype=torch.float32, softmax=PLAIN):
    """Hold a version to float64 where each query sees all that is held."""
    out, weights = weighed(version, q, pages, scaling, softmax)
    outs, shares = attended(q, pages, scaling, dtype, softmax)
    assert out.dtype == q.dtype and weights.dtype == torch.float32
    assert weights.shape == (*q.shape[:2], pages.table.shape[1] * pages.keys.shape[1])
    hold_rows(out, outs)
    hold_rows(weights, shares)
    assert torch.equal(version(q, pages, None, scaling, softmax=softmax)[0], out)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_version_equals_attention_by_hand(version, case):
    check(version, *given(**{"dim": 64, **case}))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", HELD.values(), ids=HELD)
def test_one_query_sees_all_that_is_held(version, case):
    check_held(version, *filled(**{"dim": 64, **case}))


@pytest.mark.parametrize("version", VERSIONS)
def test_several_queries_see_all_that_is_held(version):
    q, pages = filled([40, 0, 300], 6, dim=20)
    more = torch.cat([q, -q, 2 * q], 2)
    out, weights = version(more, pages, None, SCALING)
    assert weights is None
    for i in range(3):
        hold_rows(out[:, :, i : i + 1], attended(more[:, :, i : i + 1], pages, SCALING)[0])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("count", [1, 5])
def test_padding_sees_nothing(version, count):
    arguments = given([40, 30, 9, 20], 4, count, batch=2, dim=16)
    arguments[2][0, :2] = -1
    check(version, *arguments)


@pytest.mark.parametrize("version", VERSIONS)
def test_more_queries_than_a_block(version):
    arguments = given([700], 1, BLOCK + 13, dim=8, ordered=True)
    check(version, *arguments)


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_share_pages(version):
    """The second row begins with two pages of the first, and the third is the first once more."""
    q, pages = filled([50, 45, 50], 6, dim=64)
    pages.table[1, :2], pages.table[2] = pages.table[0, :2], pages.table[0]
    assert len(places(pages, 1).unique()) == 45
    check_held(version, q, pages)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_table_that_is_cut(version):
    """Its rows lie apart, and numbers behind a row's pages name none."""
    q, pages = filled([20, 3, 0], 3, dim=16, spare=9)
    for row, used in enumerate([2, 1, 0]):
        pages.table[row, used:] = 2**31 - 1
    check_held(version, q, pages._replace(table=pages.table[:, :2]))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [60, 64, 128])
def test_half_precision_is_summed_in_float32(version, dtype, dim):
    check(version, *given([70, 1, 130], 6, 7, dim=dim, dtype=dtype))
    check_held(version, *filled([700, 1, 300], 6, dim=dim, dtype=dtype))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 16, 64])
def test_cpp_reads_every_finite_half(dtype, width):
    """Subnormal numbers and the largest ones among them; a weight of 1 gives a value back."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()].view(-1, 1, width)
    table = torch.arange(len(values), dtype=torch.int32)[:, None]
    q = torch.zeros(len(values), 1, 1, width, dtype=dtype)
    pages = Pages(torch.zeros_like(values), values, table, None, table, torch.ones_like(table[:, 0]))
    out, _ = cpu.paged_attention(q, pages, None, 1.0)
    assert torch.equal(out.flatten(), values.flatten())


@needs_compiler
@pytest.mark.parametrize("count", [1, 50])
def test_cpp_depends_neither_on_threads_nor_on_where_pages_lie(count):
    q, pages, *others = given([1400, 30, 370], 6, count, dim=64, window=900, recent=20)
    check_threads_and_pages(lambda pages: cpu.paged_attention(q, pages, *others)[0], pages)


def test_weights_of_several_queries_are_refused():
    q, pages, *others = given([40, 9], 2, 3, dim=16)
    with pytest.raises(ValueError, match="weights of 3 queries"):
        paged_attention(q, pages, *others, weigh=True)


def test_pytorch_reads_columns_with_gaps_and_cpp_refuses_them(fresh):
    q, pages = filled([40, 9], 2, dim=64)
    wide = torch.cat([pages.keys, pages.values], 2)
    keys, values = wide.split(64, 2)
    apart = pages._replace(keys=keys, values=values)
    assert apart.facts.gaps == "a column is not contiguous"
    hold_rows(paged_attention(q, apart, None, SCALING)[0], attended(q, pages, SCALING)[0])


def test_without_a_compiler_pytorch_takes_over_and_says_so_once(fresh, caplog):
    fresh.delenv("CXX", raising=False)
    fresh.setattr(shutil, "which", lambda name: None)
    caplog.set_level(logging.INFO)
    arguments = (*filled([40, 9], 2, dim=64), None, SCALING)
    for _ in range(2):
        out, _ = paged_attention(*arguments)
    assert torch.equal(out, reference_paged_attention(*arguments)[0])
    (line,) = [record.getMessage() for record in caplog.records if "paged_attention" in record.getMessage()]
    assert line.startswith("paged_attention: reference (triton: ")
    assert line.endswith("; cpp: there is no C++ compiler (install g++))")
    fresh.setenv("AG_KERNELS", "cpp")
    with pytest.raises(UserError, match=r"AG_KERNELS=cpp: paged_attention .*C\+\+"):
        paged_attention(*arguments)


@pytest.mark.parametrize("count", [1, 3])
def test_float64_is_left_to_pytorch_and_a_gate_is_not_needed(fresh, count):
    q, pages, *others = given([40, 9], 2, count, dim=16, dtype=torch.float64)
    exact, _ = paged_attention(q, pages, *others)
    assert exact.dtype == torch.float64
    check(paged_attention, q, pages, *others, dtype=torch.float64)
    assert torch.equal(paged_attention(q, pages._replace(gate=None), *others)[0], exact)
