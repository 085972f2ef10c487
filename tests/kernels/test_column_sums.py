import itertools
import math
from collections import defaultdict

import pytest
import torch

from ag.kernels.column_sums import column_sums
from ag.kernels.column_sums.reference import reference_column_sums
from tests.support.bounds import bounded, hold

OPTIONS = {
    "plain": {},
    "power": {"power": 2},
    "skip": {"skip": 4},
    "mean": {"mean": True},
    "window": {"window": 9},
    "left-padding": {"padding": "left"},
    "right-padding": {"padding": "right", "mean": True},
    "responses": {"queries": "last"},
    "all": {"padding": "left", "power": 2, "skip": 3, "mean": True, "window": 31, "queries": "some"},
    "later": {"newest": 20},
    "later-all": {"newest": 14, "padding": "left", "skip": 2, "mean": True, "window": 9, "queries": "some"},
}


def inputs(length, heads, kv_heads, dim=12, padding=None, queries="all", newest=None, **options):
    generator = torch.Generator().manual_seed(length * 7 + heads)
    q, k = (2 * torch.randn(2, h, length, dim, generator=generator, dtype=torch.float64) for h in (heads, kv_heads))
    valid = torch.ones(2, length, dtype=torch.bool)
    if padding:
        valid[1, length - length // 3 :] = False
        valid = valid.flip(1) if padding == "left" else valid
        options["key_valid"] = valid
    counting = {"all": valid, "last": torch.arange(length) >= length - 5, "some": torch.arange(length) % 3 > 0}[queries]
    first = length - min(newest or length, length)
    return q[:, :, first:], k, {"scaling": dim**-0.5, "queries": (counting & valid)[:, first:]} | options


def weights(q, k, scaling, queries, key_valid=None, window=None):
    """The definition, one pair at a time: sequence, head, query that counts, key and weight."""
    ahead = k.shape[2] - q.shape[2]
    for b, h, j in itertools.product(*map(range, q.shape[:3])):
        seen = [t for t in range(ahead + j + 1) if window is None or ahead + j - t < window]
        seen = [t for t in seen if key_valid is None or key_valid[b, t]]
        paid = [math.exp(scaling * float(q[b, h, j] @ k[b, h * k.shape[1] // q.shape[1], t])) for t in seen]
        yield from ((b, h, j, t, weight / sum(paid)) for t, weight in zip(seen, paid, strict=True) if queries[b, j])


def loops(q, k, power=1, skip=0, mean=False, **options):
    """Sums over those pairs."""
    paid, ahead = defaultdict(list), k.shape[2] - q.shape[2]
    for b, h, j, t, weight in weights(q, k, **options):
        if ahead + j - t >= skip:
            paid[b, h, t].append(weight**power)
    out = torch.zeros(*q.shape[:2], k.shape[2], dtype=q.dtype)
    for place, values in paid.items():
        out[place] = sum(values) / (len(values) if mean else 1)
    return out


def by_reference(q, k, options, dtype=torch.float64):
    """The sums of a computation in a type."""
    return reference_column_sums(bounded(q, dtype), bounded(k, dtype), **options)


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_both_versions_equal_loops(case):
    q, k, options = inputs(23, 4, 2, **OPTIONS[case])
    want, error = loops(q, k, **options), by_reference(q, k, options).error
    for function in (column_sums, reference_column_sums):
        hold(function(q, k, **options), want, error)


@pytest.mark.parametrize("case", OPTIONS, ids=str)
@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(129, 6, 2), (300, 3, 3), (257, 4, 1)])
def test_chunked_equals_reference(length, heads, kv_heads, case):
    q, k, options = inputs(length, heads, kv_heads, **OPTIONS[case])
    got = column_sums(q, k, **options)
    assert got.shape == (2, heads, length)
    hold(got, by_reference(q, k, options))
    for dtype in (torch.float32, torch.bfloat16):
        rounded = q.to(dtype), k.to(dtype)
        single = column_sums(*rounded, **options)
        assert single.dtype == torch.float32
        hold(single, by_reference(*rounded, options, dtype))


def test_no_query_counts():
    q, k, options = inputs(40, 2, 1)
    options["queries"] = torch.zeros(2, 40, dtype=torch.bool)
    assert column_sums(q, k, **options, mean=True).abs().sum() == 0
