"""What is hard to sum, for the PyTorch and C++ versions of the kernels."""

import pytest
import torch

from ag.kernels.column_max import cpu as max_cpu
from ag.kernels.column_max.chunked import chunked_column_max
from ag.kernels.column_max.reference import reference_column_max
from ag.kernels.column_sums.chunked import chunked_column_sums
from ag.kernels.column_sums.reference import reference_column_sums
from ag.kernels.gated_attention.chunked import chunked_gated_attention
from ag.kernels.gated_attention.reference import reference_gated_attention
from ag.kernels.gated_prefill.chunked import chunked_gated_prefill
from ag.kernels.gated_prefill.reference import reference_gated_prefill
from ag.kernels.paged_attend import cpu as attend_cpu
from ag.kernels.paged_attend.reference import reference_paged_attend
from ag.kernels.paged_decode import cpu as paged_cpu
from ag.kernels.paged_decode import reference_paged_decode
from ag.kernels.softmax import PLAIN
from tests.support.bounds import bounded, hold
from tests.support.compiled import needs
from tests.support.hard import HARD, SCALING, check_columns, check_gated_attention, hard
from tests.support.paged import attended, filled, hold_rows, in_pages, places

needs_compiler = needs(paged_cpu.KERNEL)


@pytest.mark.parametrize("name", HARD)
def test_gated_attention(name):
    check_gated_attention(chunked_gated_attention, reference_gated_attention, name, 300)


@pytest.mark.parametrize("name", HARD)
def test_columns(name):
    check_columns(chunked_column_sums, reference_column_sums, name, 300)
    check_columns(chunked_column_sums, reference_column_sums, name, 300, power=2)
    check_columns(chunked_column_max, reference_column_max, name, 300)


@needs(max_cpu.KERNEL)
@pytest.mark.parametrize("name", HARD)
def test_maxima_in_cpp(name):
    check_columns(max_cpu.column_max, reference_column_max, name, 300)


@pytest.mark.parametrize("name", HARD)
def test_gated_prefill(name):
    q, k, v, keep, _ = hard(name, 300)
    options = {"key_valid": None, "scaling": SCALING, "recent": 4, "sinks": 1}
    want = reference_gated_prefill(*map(bounded, (q, k, v)), keep.bool(), **options)
    hold(chunked_gated_prefill(q, k, v, keep.bool(), **options), want)


@pytest.mark.parametrize(
    "decode", [pytest.param(paged_cpu.paged_decode, id="cpp", marks=needs_compiler), reference_paged_decode]
)
@pytest.mark.parametrize("name", HARD)
def test_paged_decode(name, decode):
    q, k, v, *_ = hard(name, 300)
    q, pages = q[:, :, -1:], in_pages(k[0], v[0])
    weights = torch.full((1, 4, pages.table.shape[1] * 16), torch.nan)
    out = decode(q, pages, SCALING, weights)
    outs, shares = attended(q, pages, SCALING)
    hold_rows(out, outs)
    hold_rows(weights, shares)


@pytest.mark.parametrize(
    "attend", [pytest.param(attend_cpu.paged_attend, id="cpp", marks=needs_compiler), reference_paged_attend]
)
@pytest.mark.parametrize("name", HARD)
def test_paged_attend(name, attend):
    q, k, v, *_ = hard(name, 300)
    q, pages = q[:, :, -40:], in_pages(k[0], v[0])
    for row in range(2):
        pages.ranks.flatten()[places(pages, row)] = torch.arange(300, dtype=torch.int32)
    got = attend(q, pages, torch.arange(260, 300)[None], SCALING)
    hidden = torch.ones(40, 300, dtype=torch.bool).triu(261)
    s = (bounded(q[0]).unflatten(0, (2, -1)) @ bounded(k[0])[:, None].mT) * SCALING
    want = s.masked_fill(hidden, float("-inf")).softmax(-1) @ bounded(v[0])[:, None]
    hold(got, want.flatten(0, 1)[None])


def attend_once(version):
    """A version of ``paged_attend`` called as one of ``paged_decode`` is."""
    return lambda q, pages, scaling: version(q, pages, torch.full((1, 1), 50), scaling, None, None, PLAIN)


@pytest.mark.parametrize(
    "decode",
    [
        pytest.param(paged_cpu.paged_decode, id="decode-cpp", marks=needs_compiler),
        pytest.param(reference_paged_decode, id="decode-reference"),
        pytest.param(attend_once(attend_cpu.paged_attend), id="attend-cpp", marks=needs(attend_cpu.KERNEL)),
        pytest.param(attend_once(reference_paged_attend), id="attend-reference"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", ["keys", "values"])
def test_what_is_not_finite_shows(column, value, dtype, decode):
    """In every number of what sees it, and nowhere else: a model that overflows is to be noticed."""
    q, pages = filled([40, 30], 4, dim=64, dtype=dtype)
    pages.ranks.flatten()[torch.cat([places(pages, 0), places(pages, 1)])] = torch.arange(70, dtype=torch.int32) % 40
    before = decode(q, pages, SCALING)
    getattr(pages, column).flatten(0, 1)[places(pages, 0)[7]] = value
    after = decode(q, pages, SCALING)
    assert before.isfinite().all() and not after[:, :2].isfinite().any()
    assert torch.equal(after[:, 2:], before[:, 2:])
