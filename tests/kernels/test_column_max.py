import pytest
import torch

from ag.kernels.column_max import column_max
from ag.kernels.column_max.reference import reference_column_max
from tests.kernels.test_column_sums import inputs as plain_inputs
from tests.kernels.test_column_sums import weights
from tests.support.bounds import bounded, hold

OPTIONS = {
    "plain": {},
    "window": {"window": 9},
    "left-padding": {"padding": "left"},
    "right-padding": {"padding": "right"},
    "responses": {"queries": "last"},
    "factors": {"factors": 0},
    "all": {"padding": "left", "window": 31, "queries": "some", "factors": 3},
    "later": {"newest": 14, "padding": "left", "window": 9, "factors": 3},
}


def inputs(length, heads, kv_heads, dim=12, factors=None, **options):
    """As for column sums; ``factors``: the number of queries whose factor is 0."""
    q, k, options = plain_inputs(length, heads, kv_heads, dim, **options)
    if factors is not None:
        generator, shape = torch.Generator().manual_seed(length), options["queries"].shape
        draw = torch.rand(shape, generator=generator, dtype=torch.float64) * 3 + 0.1
        draw[:, -factors:] *= factors == 0
        options["factors"] = draw
    return q, k, options


def loops(q, k, factors=None, **options):
    """The largest of each key's pairs, one by one."""
    out = torch.zeros(*q.shape[:2], k.shape[2], dtype=q.dtype)
    for b, h, j, t, weight in weights(q, k, **options):
        out[b, h, t] = max(float(out[b, h, t]), (1.0 if factors is None else float(factors[b, j])) * weight)
    return out


def by_reference(q, k, options, dtype=torch.float64):
    """The maxima of a computation in a type."""
    return reference_column_max(bounded(q, dtype), bounded(k, dtype), **options)


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_both_versions_equal_loops(case):
    q, k, options = inputs(23, 4, 2, **OPTIONS[case])
    want, error = loops(q, k, **options), by_reference(q, k, options).error
    for function in (column_max, reference_column_max):
        hold(function(q, k, **options), want, error)


@pytest.mark.parametrize("case", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads"), [(1, 2, 1), (127, 2, 2), (129, 6, 2), (300, 3, 3), (257, 4, 1)]
)
def test_chunked_equals_reference(length, heads, kv_heads, case):
    q, k, options = inputs(length, heads, kv_heads, **OPTIONS[case])
    got = column_max(q, k, **options)
    assert got.shape == (2, heads, length)
    hold(got, by_reference(q, k, options))
    for dtype in (torch.float32, torch.bfloat16):
        rounded = q.to(dtype), k.to(dtype)
        single = column_max(*rounded, **options)
        assert single.dtype == torch.float32
        hold(single, by_reference(*rounded, options, dtype))
