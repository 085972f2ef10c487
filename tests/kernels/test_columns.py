"""Column sums and column maxima: each version against the definition, pair by pair."""

import itertools
import math
from collections import defaultdict

import pytest
import torch

from ag.kernels.column_max import column_max, cpu
from ag.kernels.column_max.chunked import chunked_column_max
from ag.kernels.column_max.reference import reference_column_max
from ag.kernels.column_sums import column_sums
from ag.kernels.column_sums.reference import reference_column_sums
from tests.support.bounds import bounded, hold
from tests.support.compiled import needs

#: By name, the operation and its reference.
OPERATIONS = {"sums": (column_sums, reference_column_sums), "max": (column_max, reference_column_max)}
#: By name, the operation and its version in PyTorch, which may be the same.
VERSIONS = {"sums": (column_sums,), "max": (column_max, chunked_column_max)}
#: Options of both.
BOTH = {
    "plain": {},
    "window": {"window": 9},
    "left-padding": {"padding": "left"},
    "right-padding": {"padding": "right"},
    "responses": {"queries": "last"},
    "later": {"newest": 20},
}
EACH = {
    "sums": {
        "power": {"power": 2},
        "skip": {"skip": 4},
        "mean": {"mean": True, "padding": "right"},
        "all": {"padding": "left", "power": 2, "skip": 3, "mean": True, "window": 31, "queries": "some"},
        "later-all": {"newest": 14, "padding": "left", "skip": 2, "mean": True, "window": 9, "queries": "some"},
    },
    "max": {
        "factors": {"factors": 0},
        "all": {"padding": "left", "window": 31, "queries": "some", "factors": 3},
        "later-all": {"newest": 14, "padding": "left", "window": 9, "factors": 3},
    },
}
CASES = [
    pytest.param(name, options, id=f"{name}-{case}")
    for name, more in EACH.items()
    for case, options in (BOTH | more).items()
]


def inputs(length, heads, kv_heads, dim=12, padding=None, queries="all", newest=None, factors=None, **options):
    """Return q, k and the other arguments; ``factors``: the number of last queries whose factor is 0."""
    generator = torch.Generator().manual_seed(length * 7 + heads)
    q, k = (2 * torch.randn(2, h, length, dim, generator=generator, dtype=torch.float64) for h in (heads, kv_heads))
    valid = torch.ones(2, length, dtype=torch.bool)
    if padding:
        valid[1, length - length // 3 :] = False
        valid = valid.flip(1) if padding == "left" else valid
        options["key_valid"] = valid
    counting = {"all": valid, "last": torch.arange(length) >= length - 5, "some": torch.arange(length) % 3 > 0}[queries]
    first = length - min(newest or length, length)
    options |= {"scaling": dim**-0.5, "queries": (counting & valid)[:, first:]}
    if factors is not None:
        options["factors"] = torch.rand(2, length - first, generator=generator, dtype=torch.float64) * 3 + 0.1
        options["factors"][:, -factors:] *= factors == 0
    return q[:, :, first:], k, options


def loops(name, q, k, scaling, queries, key_valid=None, window=None, power=1, skip=0, mean=False, factors=None):
    """The definition, one pair at a time."""
    paid, ahead = defaultdict(list), k.shape[2] - q.shape[2]
    for b, h, j in itertools.product(*map(range, q.shape[:3])):
        seen = [t for t in range(ahead + j + 1) if window is None or ahead + j - t < window]
        seen = [t for t in seen if key_valid is None or key_valid[b, t]]
        given = [math.exp(scaling * float(q[b, h, j] @ k[b, h * k.shape[1] // q.shape[1], t])) for t in seen]
        for t, weight in zip(seen, given, strict=True):
            if queries[b, j] and ahead + j - t >= skip:
                factor = 1.0 if factors is None else float(factors[b, j])
                paid[b, h, t].append(factor * (weight / sum(given)) ** power)
    out = torch.zeros(*q.shape[:2], k.shape[2], dtype=q.dtype)
    for place, values in paid.items():
        out[place] = max(values) if name == "max" else sum(values) / (len(values) if mean else 1)
    return out


def by_reference(name, q, k, options, dtype=torch.float64):
    """What a computation in a type gives."""
    return OPERATIONS[name][1](bounded(q, dtype), bounded(k, dtype), **options)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_versions_equal_loops(name, options):
    q, k, options = inputs(23, 4, 2, **options)
    want, error = loops(name, q, k, **options), by_reference(name, q, k, options).error
    for function in OPERATIONS[name]:
        hold(function(q, k, **options), want, error)


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads"), [(1, 2, 1), (127, 2, 2), (129, 6, 2), (300, 3, 3), (257, 4, 1)]
)
def test_fast_versions_equal_reference(length, heads, kv_heads, name, options):
    q, k, options = inputs(length, heads, kv_heads, **options)
    got = OPERATIONS[name][0](q, k, **options)
    assert got.shape == (2, heads, length)
    hold(got, by_reference(name, q, k, options))
    for dtype in (torch.float32, torch.bfloat16):
        rounded = q.to(dtype), k.to(dtype)
        want = by_reference(name, *rounded, options, dtype)
        for compute in VERSIONS[name]:
            single = compute(*rounded, **options)
            assert single.dtype == torch.float32
            hold(single, want)


@needs(cpu.KERNEL)
def test_maxima_in_cpp_do_not_depend_on_the_number_of_threads(monkeypatch):
    q, k, options = inputs(300, 6, 2, dim=20, padding="left", window=140, queries="some", factors=3)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(cpu.column_max(q.float(), k.float(), **options))
    assert torch.equal(*found) and int((found[0] > 0).sum()) > 2000


def test_no_query_counts():
    q, k, options = inputs(40, 2, 1)
    options["queries"] = torch.zeros(2, 40, dtype=torch.bool)
    assert column_sums(q, k, **options, mean=True).abs().sum() == 0
