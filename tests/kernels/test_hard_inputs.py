"""What is hard to sum, for the PyTorch and C++ versions of the kernels."""

import pytest
import torch

from ag.kernels.attention_stats.reference import reference_attention_stats
from ag.kernels.gated_attention.chunked import chunked_gated_attention
from ag.kernels.gated_attention.reference import reference_gated_attention
from ag.kernels.gated_prefill.chunked import chunked_gated_prefill
from ag.kernels.gated_prefill.reference import reference_gated_prefill
from ag.kernels.paged_attention import cpu as paged_cpu
from ag.kernels.paged_attention import reference_paged_attention
from tests.kernels.test_attention_stats import VERSIONS, kinds
from tests.kernels.test_paged_attention import check_held
from tests.support.bounds import bounded, hold
from tests.support.compiled import needs
from tests.support.hard import HARD, SCALING, check_gated_attention, check_stats, hard
from tests.support.paged import filled, in_pages, places

PAGED = [
    pytest.param(paged_cpu.paged_attention, id="cpp", marks=needs(paged_cpu.KERNEL)),
    pytest.param(reference_paged_attention, id="reference"),
]


@pytest.mark.parametrize("name", HARD)
def test_gated_attention(name):
    check_gated_attention(chunked_gated_attention, reference_gated_attention, name, 300)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", HARD)
@kinds
def test_attention_stats(kind, name, version):
    check_stats(version, reference_attention_stats, kind, name, 300)


@pytest.mark.parametrize("name", HARD)
def test_gated_prefill(name):
    q, k, v, keep, _ = hard(name, 300)
    options = {"key_valid": None, "scaling": SCALING, "recent": 4, "sinks": 1}
    want = reference_gated_prefill(*map(bounded, (q, k, v)), keep.bool(), **options)
    hold(chunked_gated_prefill(q, k, v, keep.bool(), **options), want)


@pytest.mark.parametrize("attend", PAGED)
@pytest.mark.parametrize("name", HARD)
def test_one_query_against_pages(name, attend):
    q, k, v, *_ = hard(name, 300)
    check_held(attend, q[:, :, -1:], in_pages(k[0], v[0]), SCALING)


@pytest.mark.parametrize("attend", PAGED)
@pytest.mark.parametrize("name", HARD)
def test_several_queries_against_pages(name, attend):
    q, k, v, *_ = hard(name, 300)
    q, pages = q[:, :, -40:], in_pages(k[0], v[0])
    for row in range(2):
        pages.ranks.flatten()[places(pages, row)] = torch.arange(300, dtype=torch.int32)
    got, _ = attend(q, pages, torch.arange(260, 300)[None], SCALING)
    hidden = torch.ones(40, 300, dtype=torch.bool).triu(261)
    s = (bounded(q[0]).unflatten(0, (2, -1)) @ bounded(k[0])[:, None].mT) * SCALING
    want = s.masked_fill(hidden, float("-inf")).softmax(-1) @ bounded(v[0])[:, None]
    hold(got, want.flatten(0, 1)[None])


@pytest.mark.parametrize("attend", PAGED)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", ["keys", "values"])
def test_what_is_not_finite_shows(column, value, dtype, count, attend):
    """In every number of what sees it, and nowhere else: a model that overflows is to be noticed."""
    q, pages = filled([40, 30], 4, dim=64, dtype=dtype)
    pages.ranks.flatten()[torch.cat([places(pages, 0), places(pages, 1)])] = torch.arange(70, dtype=torch.int32) % 40
    q, ranks = q.expand(-1, -1, count, -1), torch.full((1, count), 50)
    before, _ = attend(q, pages, ranks, SCALING)
    getattr(pages, column).flatten(0, 1)[places(pages, 0)[7]] = value
    after, _ = attend(q, pages, ranks, SCALING)
    assert before.isfinite().all() and not after[:, :2].isfinite().any()
    assert torch.equal(after[:, 2:], before[:, 2:])
