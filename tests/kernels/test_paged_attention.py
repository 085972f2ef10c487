"""Attention to rows in pages, of numbers and of codes: the reference against its definition, versions against it."""

import logging
import math
import shutil

import pytest
import torch

from ag.errors import UserError
from ag.kernels.paged_attention import cpu, paged_attention, reference
from ag.kernels.pages import Pages, decoded
from ag.kernels.softmax import PLAIN, Softmax
from tests.support.bounds import near, right
from tests.support.compiled import INTERPRETED, needs, versions
from tests.support.hard import HARD, hard
from tests.support.hard import SCALING as HARD_SCALING
from tests.support.paged import check_threads_and_pages, coded, filled, in_pages, places, read

SCALING = 0.3
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 5.0, -3.0])
fast = versions("paged_attention", "cpp", "triton")
every = versions("paged_attention", "reference", "cpp", "triton")

#: What :func:`given` makes; ``held``: the queries see all that is held, as a new token without windows does.
CASES = {
    "empty_row": {"lengths": [0, 100, 1], "heads": 6, "count": 3},
    "page_borders": {"lengths": [15, 16, 17, 31, 32, 33], "heads": 6, "count": 5, "batch": 3, "dim": 60},
    "tile_borders": {"lengths": [63, 64, 65, 129], "heads": 4, "count": 17, "batch": 2},
    "window": {"lengths": [200, 90], "heads": 6, "count": 30, "window": 40, "softmax": Softmax(3.0)},
    "window_and_recent": {"lengths": [150, 90], "heads": 6, "count": 9, "window": 50, "recent": 6, "batch": 2,
                          "softmax": Softmax(3.0, SINKS)},
    "ordered_window": {"lengths": [300, 80], "heads": 2, "count": 60, "ordered": True, "window": 30},
    "pages_of_5": {"lengths": [70, 4, 5, 6], "heads": 8, "count": 4, "page": 5},
    "more_than_a_block": {"lengths": [700], "heads": 1, "count": reference.BLOCK + 13, "dim": 8, "ordered": True},
    "D128": {"lengths": [59, 20], "heads": 4, "count": 40, "dim": 128},
    "several-held": {"lengths": [40, 0, 300], "heads": 6, "count": 3, "held": True, "dim": 20},
    "one-chunk_borders": {"lengths": [255, 256, 257, 513], "heads": 8},
    "one-uneven_batch": {"lengths": [1000, 3, 41, 640, 77, 0], "heads": 6, "batch": 3, "window": 40},
    "one-window_and_recent": {"lengths": [300, 90], "heads": 10, "window": 50, "recent": 6, "batch": 2},
    "one-pages_of_100": {"lengths": [230, 7], "heads": 6, "page": 100, "recent": 20},
    "one-held": {"lengths": [0, 7, 300], "heads": 9, "held": True},
    "one-nothing": {"lengths": [0, 0], "heads": 2, "held": True},
    "one-no_pages": {"lengths": [0, 0], "heads": 2, "held": True, "spare": 0},
    "one-held-chunk_borders": {"lengths": [255, 256, 257, 513], "heads": 12, "held": True, "batch": 2,
                               "softmax": Softmax(3.0, SINKS)},
    "one-held-G7-D80-Dv48": {"lengths": [259, 20], "heads": 14, "dim": 80, "width": 48, "held": True},
    "one-held-consecutive": {"lengths": [1000, 513], "heads": 4, "scattered": False, "held": True, "dim": 128},
    "one-held-D5": {"lengths": [33, 20], "heads": 2, "dim": 5, "held": True},
} if not INTERPRETED else {
    "window_and_recent": {"lengths": [80, 0], "heads": 6, "count": 9, "window": 50, "recent": 6, "dim": 20, "width": 12,
                          "softmax": Softmax(3.0, SINKS)},
    "one-recent": {"lengths": [59, 40], "heads": 6, "batch": 2, "dim": 16, "recent": 9},
    "one-held": {"lengths": [0, 70], "heads": 6, "held": True, "dim": 12, "softmax": Softmax(3.0, SINKS)},
    "page_borders": {"lengths": [15, 16, 17, 31, 32, 33], "heads": 6, "count": 5, "batch": 3, "dim": 16},
    "ordered": {"lengths": [130, 80], "heads": 2, "count": 60, "ordered": True, "scattered": False, "dim": 16},
    "pages_of_5": {"lengths": [70, 4, 5, 6], "heads": 8, "count": 4, "page": 5, "dim": 16},
    "several-held": {"lengths": [40, 0, 60], "heads": 6, "count": 3, "held": True, "dim": 20},
    "one-window": {"lengths": [150, 90], "heads": 4, "window": 20, "dim": 16},
    "one-no_pages": {"lengths": [0, 0], "heads": 2, "held": True, "spare": 0, "dim": 16},
    "one-more-chunks-than-are-mixed-at-once": {"lengths": [2000, 1100], "heads": 3, "batch": 2, "dim": 8, "held": True},
}  # fmt: skip
BY_DAY = ("window_and_recent", "one-recent", "one-held") if INTERPRETED else CASES


def given(lengths, heads, count=1, *, batch=1, window=None, recent=None, ordered=False, held=False, softmax=PLAIN,
          dtype=torch.float32, **options):  # fmt: skip
    """Return the arguments: rows whose tokens lie in any order unless ``ordered``, and queries of the newest tokens.

    Some token indices are missing in each row, those of queries too, as they are where every step evicts.
    """
    q, pages = filled(lengths, heads, batch, dtype=dtype, gate=torch.bool, **{"dim": 64} | options)
    generator = torch.Generator().manual_seed(sum(lengths))
    last = max(lengths) + 5
    for row, length in enumerate(lengths):
        token_indices = torch.randperm(last, generator=generator)[:length]
        token_indices = token_indices.sort().values if ordered else token_indices
        pages.token_indices.flatten()[places(pages, row)] = token_indices.int()
        pages.gate.flatten()[places(pages, row)] = torch.rand(length, generator=generator) < 0.3
    q = torch.randn(batch, heads, count, q.shape[-1], generator=generator).to(dtype) * 2
    token_indices = None if held else torch.arange(last - count, last).expand(batch, -1).clone()
    return q, pages, token_indices, SCALING, window, recent, softmax


def check(version, q, pages, token_indices, scaling=SCALING, window=None, recent=None, softmax=PLAIN):
    """Hold the output, and of one query the weights, to the reference in float64 on the numbers that are held."""
    weigh = q.shape[2] == 1
    options = token_indices, scaling, window, recent, softmax, weigh
    numbers = decoded(pages, pages.keys, pages.values)

    def exactly(q, keys, values):
        found = reference.paged_attention(q, pages._replace(keys=keys, values=values, format=None), *options)
        return [x.double() for x in found if x is not None]

    got = version(q, pages, *options)
    assert (got[1] is not None) == weigh and got[0].dtype == q.dtype
    for mine, want in zip(got, right(exactly, q, *numbers), strict=False):
        near(mine, want, dtype=q.dtype)


def by_hand(q, pages, token_indices, scaling, window, recent, softmax):
    """The definition: attention of each query to the tokens of its row that it sees, one by one."""
    rows, group = len(pages.block_table), q.shape[0] * q.shape[1] // len(pages.block_table)
    out, by_row = (
        torch.zeros(rows, group, q.shape[2], pages.channels[1], dtype=q.dtype),
        q.view(rows, group, -1, q.shape[3]),
    )
    for row in range(rows):
        k, v, held, gates = (read(pages, x, row) for x in pages.columns)
        for g in range(group):
            for i, query in enumerate(by_row[row, g]):
                own = None if token_indices is None else int(token_indices[row * len(token_indices) // rows, i])
                total = (
                    0.0 if softmax.sinks is None else math.exp(softmax.sinks[(row * group + g) % len(softmax.sinks)])
                )
                for t, token_index in enumerate(held.tolist()):
                    age = 0 if own is None else own - token_index
                    if age < 0 or (window is not None and age >= window):
                        continue
                    if recent is not None and age >= recent and not gates[t]:
                        continue
                    s = scaling * float(query @ k[t])
                    weight = math.exp(s if softmax.cap is None else softmax.cap * math.tanh(s / softmax.cap))
                    total, out[row, g, i] = total + weight, out[row, g, i] + weight * v[t]
                out[row, g, i] /= total or 1.0
    return out.view(*q.shape[:3], -1)


@versions("paged_attention", "reference")
@pytest.mark.parametrize("softmax", [PLAIN, Softmax(3.0, SINKS[:4])], ids=["plain", "capped-beside-sinks"])
@pytest.mark.parametrize("masks", [{}, {"window": 9}, {"window": 12, "recent": 3}, {"held": True}], ids=str)
def test_the_reference_is_the_definition(version, masks, softmax):
    arguments = given([20, 0, 9, 14], 8, 3, batch=2, dim=5, width=3, softmax=softmax, dtype=torch.float64, **masks)
    found, _ = version(*arguments)
    torch.testing.assert_close(found, by_hand(*arguments), rtol=1e-9, atol=1e-12)


@fast
@pytest.mark.parametrize("kind", ["numbers", "codes"])
@pytest.mark.parametrize("case", [pytest.param(x, marks=[] if x in BY_DAY else pytest.mark.nightly) for x in CASES])
def test_versions_equal_the_reference(version, case, kind):
    q, pages, *options = given(**CASES[case])
    odd = any(width % 2 for width in pages.channels)  # Triton leaves an odd number of bytes to others
    check(version, q, coded(pages) if kind == "codes" and not (odd and INTERPRETED) else pages, *options)


@fast
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["numbers", "codes"])
@pytest.mark.parametrize("count", [1, 7])
def test_half_precision(version, dtype, count, kind):
    q, pages, *options = given([70, 1, 130], 6, count, dim=32 if INTERPRETED else 60, dtype=dtype)
    check(version, q, coded(pages) if kind == "codes" else pages, *options)


@every
def test_autocast_changes_nothing(version):
    q, pages, *options = given([70, 1, 130], 6, dim=32)
    with torch.autocast(q.device.type, torch.bfloat16):
        found = version(q, pages, *options, True)
    assert all(map(torch.equal, found, version(q, pages, *options, True)))


@every
@pytest.mark.parametrize("count", [1, 5])
def test_padding_sees_nothing(version, count):
    arguments = given([40, 30, 9, 20], 4, count, batch=2, dim=16)
    arguments[2][0, :2] = -1
    check(version, *arguments)
    assert not version(*arguments)[0][0, :, :2].any()


@every
def test_rows_share_pages_and_the_table_is_cut(version):
    """The third row begins with two pages of the first; numbers behind a row's pages name none, and rows lie apart."""
    q, pages, *options = given([50, 3, 45, 0], 8, dim=16, spare=9, held=True)
    pages.block_table[2, :2] = pages.block_table[0, :2]
    for row, used in enumerate([4, 1, 3, 0]):
        pages.block_table[row, used:] = 2**31 - 1
    check(version, q, pages._replace(block_table=pages.block_table[:, :4]), *options)


@fast
@pytest.mark.parametrize("name", HARD if not INTERPRETED else HARD[1:2])
@pytest.mark.parametrize("count", [1, 40])
def test_hard_inputs(version, name, count):
    length = 60 if INTERPRETED else 300
    q, k, v, *_ = hard(name, length)
    check(version, q[:, :, -count:], in_pages(k[0], v[0]), torch.arange(length - count, length)[None], HARD_SCALING)


@fast
def test_every_size_of_logit_is_capped(version):
    """Of rows of one token: beside a sink of 0 its weight is the sigmoid of its capped logit."""
    some = torch.logspace(-6, 4, 15 if INTERPRETED else 60)
    logits = torch.cat([some, -some, torch.zeros(1)])
    _, pages = filled([1] * len(logits), len(logits), dim=1)
    pages.keys.nan_to_num_().fill_(1.0)
    check(version, logits[None, :, None, None], pages, None, 1.0, softmax=Softmax(2.0, torch.zeros(len(logits))))


@every
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", ["keys", "values"])
def test_what_is_not_finite_shows(version, column, value, count):
    """In every number of what sees it, and nowhere else: a model that overflows is to be noticed."""
    q, pages, token_indices, *options = given([40, 30], 4, count, dim=32)
    before, _ = version(q, pages, token_indices, *options)
    getattr(pages, column).flatten(0, 1)[places(pages, 0)[7]] = value
    pages.token_indices.flatten()[places(pages, 0)[7]] = 0
    after, _ = version(q, pages, token_indices, *options)
    assert before.isfinite().all() and not after[:, :2].isfinite().any()
    assert torch.equal(after[:, 2:], before[:, 2:])


@needs(cpu.KERNEL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 64])
def test_cpp_reads_every_finite_half(dtype, width):
    """Subnormal numbers and the largest ones among them; a weight of 1 gives a value back."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()].view(-1, 1, width)
    table = torch.arange(len(values), dtype=torch.int32)[:, None]
    q = torch.zeros(len(values), 1, 1, width, dtype=dtype)
    pages = Pages(torch.zeros_like(values), values, table, None, table, torch.ones_like(table[:, 0]))
    assert torch.equal(cpu.paged_attention(q, pages, None, 1.0)[0].flatten(), values.flatten())


@needs(cpu.KERNEL)
@pytest.mark.parametrize("kind", ["numbers", "codes"])
@pytest.mark.parametrize("count", [1, 50])
def test_cpp_depends_neither_on_threads_nor_on_where_pages_lie(count, kind):
    q, pages, *options = given([1400, 30, 370], 6, count, window=900, recent=20)
    pages = coded(pages) if kind == "codes" else pages
    check_threads_and_pages(lambda pages: cpu.paged_attention(q, pages, *options)[0], pages)


def test_weights_of_several_queries_are_refused():
    with pytest.raises(ValueError, match="weigh=True with 3 queries"):
        paged_attention(*given([40, 9], 2, 3, dim=16), weigh=True)


def test_pytorch_reads_columns_with_gaps_and_types_that_cpp_does_not_know(fresh):
    q, pages, *options = given([40, 9], 2)
    keys, values = torch.cat([pages.keys, pages.values], 2).split(64, 2)
    apart = pages._replace(keys=keys, values=values)
    assert apart.facts.gaps == "a column is not contiguous"
    check(paged_attention, q, apart, *options)
    q, pages, *options = given([40, 9], 2, 3, dtype=torch.float64)
    check(paged_attention, q, pages._replace(gate=None), *options)


def test_without_a_compiler_pytorch_takes_over_and_says_so_once(fresh, caplog):
    fresh.delenv("CXX", raising=False)
    fresh.setattr(shutil, "which", lambda name: None)
    caplog.set_level(logging.INFO)
    arguments = given([40, 9], 2)
    for _ in range(2):
        out, _ = paged_attention(*arguments)
    assert torch.equal(out, reference.paged_attention(*arguments)[0])
    (line,) = [record.getMessage() for record in caplog.records if "paged_attention" in record.getMessage()]
    assert line.startswith("paged_attention: reference (triton: ")
    assert line.endswith("; cpp: there is no C++ compiler)")
    fresh.setenv("AG_KERNELS", "cpp")
    with pytest.raises(UserError, match=r"AG_KERNELS=cpp: paged_attention .*C\+\+"):
        paged_attention(*arguments)


@versions("paged_attention", "triton")
def test_a_pool_whose_tokens_lie_apart(version, fresh, caplog):
    caplog.set_level("INFO", logger="ag.kernels.dispatch")
    q, pages, *options = given([50, 7], 2, dim=16)
    keys, values = torch.cat([pages.keys, pages.values], 2).split(16, 2)
    apart = pages._replace(keys=keys, values=values, lengths=torch.stack([pages.lengths] * 2, 1)[:, 0])
    check(version, q.mT.contiguous().mT, apart, *options)
    check(paged_attention, q, pages, *options)
    assert "paged_attention: triton" in caplog.text
