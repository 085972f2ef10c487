"""Statistics of attention on a card, against the whole attention matrix in float64."""

import pytest
import torch

from ag.kernels.attention_stats import attention_stats, reference
from ag.kernels.attention_stats.reference import STATISTICS
from tests.gpu.cases import DEVICE, covering, draw, here, name
from tests.support.bounds import near, right

pytestmark = pytest.mark.gpu
CASES = ("plain", "window", "padding", "any-order")


def given(length, group, dim, dtype, case):
    """Queries and keys of two sequences with their token indices, and the other options of a case."""
    q, k = draw(2, 2 * group, length, dim, dtype=dtype), draw(2, 2, length, dim, dtype=dtype)
    token_indices = torch.arange(length, device=DEVICE)
    own = token_indices.where(torch.rand(length, 2, device=DEVICE).T > 0.3, -1)  # not contiguous
    held = token_indices.expand(2, 1, -1)
    if case == "padding":
        held = held.where(held >= length // 3, -1)
    if case == "any-order":
        held = torch.rand(2, 2, length, device=DEVICE).argsort(-1)
        held = held.where(torch.rand(held.shape, device=DEVICE) < 0.7, -1)
    return q, k, own, held, 0.1, *((100, 3) if case == "window" else ())


def exactly(kind, q, k, *others, **options):
    """The reference in float64."""
    return right(lambda q, k: [reference.attention_stats(kind, q, k, *others, **options)], q, k)[0]


@pytest.mark.parametrize(("dim", "dtype", "sizes", "case", "kind"), covering(CASES, STATISTICS), ids=name)
def test_statistics(triton_only, dim, dtype, sizes, case, kind):
    for length, group in sizes:
        arguments = given(here(length), group, dim, dtype, case)
        options = {"factors": torch.rand(arguments[2].shape, device=DEVICE)} if kind == "max" else {}
        got = attention_stats(kind, *arguments, **options)
        near(got, exactly(kind, *arguments, **options), case, dtype)
        assert torch.equal(got, attention_stats(kind, *arguments, **options))


def test_only_some_queries_count(triton_only):
    """The last 32, as a window of observers; and none at all, which pays nothing."""
    length = here(4097)
    q, k, own, *rest = given(length, 4, 128, torch.bfloat16, "plain")
    last = own.where(own >= length - min(32, length // 2), -1)
    near(attention_stats("sum", q, k, last, *rest), exactly("sum", q, k, last, *rest), "last", q.dtype)
    assert not attention_stats("sum", q, k, own * 0 - 1, *rest).any()
