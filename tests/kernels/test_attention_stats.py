"""What queries pay each key: each version against the definition, pair by pair."""

import itertools
import math
from collections import defaultdict

import pytest
import torch

from ag.kernels.attention_stats import attention_stats, cpu
from ag.kernels.attention_stats.chunked import chunked_attention_stats
from ag.kernels.attention_stats.reference import KINDS, reference_attention_stats
from ag.kernels.softmax import PLAIN, Softmax
from tests.support.bounds import bounded, hold
from tests.support.compiled import needs

VERSIONS = [
    pytest.param(chunked_attention_stats, id="chunked"),
    pytest.param(cpu.attention_stats, id="cpp", marks=needs(cpu.KERNEL)),
]
CASES = {
    "plain": {},
    "window": {"window": 9},
    "left-padding": {"padding": "left"},
    "right-padding": {"padding": "right"},
    "responses": {"queries": "last"},
    "later": {"newest": 20},
    "skip": {"skip": 4},
    "factors": {"factors": 0},
    "any-order": {"scattered": True},
    "capped-beside-sinks": {"softmax": True},
    "all": {"padding": "left", "skip": 3, "window": 31, "queries": "some", "factors": 3, "scattered": True},
    "later-all": {"newest": 14, "padding": "left", "skip": 2, "window": 9, "factors": 3, "softmax": True},
}
cases = pytest.mark.parametrize("case", CASES)
kinds = pytest.mark.parametrize("kind", KINDS)


def inputs(length, heads, kv_heads, dim=12, *, padding=None, queries="all", newest=None, factors=None, scattered=False,
           softmax=False, **options):  # fmt: skip
    """Return q, k and the other arguments; ``factors``: the number of last queries whose factor is 0.

    ``scattered``: each head holds its keys in an order of its own, and no key of a third of the ranks.
    """
    generator = torch.Generator().manual_seed(length * 7 + heads)
    q, k = (2 * torch.randn(2, h, length, dim, generator=generator, dtype=torch.float64) for h in (heads, kv_heads))
    valid = torch.ones(2, length, dtype=torch.bool)
    if padding:
        valid[1, length - length // 3 :] = False
        valid = valid.flip(1) if padding == "left" else valid
    counting = {"all": valid, "last": torch.arange(length) >= length - 5, "some": torch.arange(length) % 3 > 0}[queries]
    first, ranks = length - min(newest or length, length), torch.arange(length)
    own, held = ranks.where(counting & valid, -1)[:, first:], ranks.where(valid, -1)[:, None]
    if scattered:
        order = torch.rand(2, kv_heads, length, generator=generator).argsort(-1)
        held = held.expand(-1, kv_heads, -1).gather(2, order)
        held = held.where(torch.rand(held.shape, generator=generator) < 0.7, -1)
        k[held < 0] = torch.nan  # what lies in free slots may be no number
    if factors is not None:
        options["factors"] = torch.rand(2, length - first, generator=generator, dtype=torch.float64) * 3 + 0.1
        options["factors"][:, -factors:] *= factors == 0
    if softmax:
        options["softmax"] = Softmax(2.0, torch.linspace(-1, 2, heads, dtype=torch.float64))
    return (q[:, :, first:], k, own, held, dim**-0.5), options


def loops(kind, q, k, own, held, scaling, window=None, skip=0, factors=None, softmax=PLAIN):
    """The definition, one pair at a time."""
    paid = defaultdict(list)
    for b, h, j in itertools.product(*map(range, q.shape[:3])):
        of_kv, rank = h * k.shape[1] // q.shape[1], int(own[b, j])
        ranks = held[b, of_kv % held.shape[1]].tolist()
        seen = [t for t, r in enumerate(ranks) if 0 <= r <= rank and (window is None or rank - r < window)]
        logits = [scaling * float(q[b, h, j] @ k[b, of_kv, t]) for t in seen]
        logits = logits if softmax.cap is None else [softmax.cap * math.tanh(s / softmax.cap) for s in logits]
        beside = 0.0 if softmax.sinks is None else math.exp(float(softmax.sinks[h]))
        given = [math.exp(s) for s in logits]
        for t, weight in zip(seen, given, strict=True):
            if rank - ranks[t] >= skip:
                factor = 1.0 if factors is None else float(factors[b, j])
                paid[b, h, t].append(factor * weight / (sum(given) + beside))
    out = torch.zeros(*q.shape[:2], k.shape[2], dtype=q.dtype)
    for place, values in paid.items():
        out[place] = {"sum": sum, "max": max, "squares": lambda x: sum(y * y for y in x)}[kind](values)
    return out


def by_reference(kind, given, options, dtype=torch.float64):
    """What a computation in a type gives."""
    q, k, *rest = given
    return reference_attention_stats(kind, bounded(q, dtype), bounded(k, dtype), *rest, **options)


@kinds
@cases
def test_versions_equal_loops(kind, case):
    given, options = inputs(23, 4, 2, **CASES[case])
    want, error = loops(kind, *given, **options), by_reference(kind, given, options).error
    for function in (attention_stats, reference_attention_stats):
        hold(function(kind, *given, **options), want, error)


@kinds
@cases
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads"), [(1, 2, 1), (127, 2, 2), (129, 6, 2), (300, 3, 3), (257, 4, 1)]
)
def test_fast_versions_equal_reference(length, heads, kv_heads, kind, case):
    given, options = inputs(length, heads, kv_heads, **CASES[case])
    got = attention_stats(kind, *given, **options)
    assert got.shape == (2, heads, length)
    hold(got, by_reference(kind, given, options))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@kinds
@cases
def test_versions_in_single_precision_equal_reference(version, dtype, kind, case):
    (q, k, *rest), options = inputs(300, 6, 2, 20, **CASES[case])
    rounded = (q.to(dtype), k.to(dtype), *rest)
    found = version(kind, *rounded, **options)
    assert found.dtype == torch.float32
    hold(found, by_reference(kind, rounded, options, dtype))


@needs(cpu.KERNEL)
@kinds
def test_cpp_does_not_depend_on_the_number_of_threads(monkeypatch, kind):
    (q, k, *rest), options = inputs(1100, 3, 1, 20, padding="left", window=700, queries="some", factors=3)
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(cpu.attention_stats(kind, q.float(), k.float(), *rest, **options))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert int((found[0] > 0).sum()) > 4000


@pytest.mark.parametrize("version", [*VERSIONS, pytest.param(reference_attention_stats, id="reference")])
@kinds
def test_no_query_counts(version, kind):
    (q, k, own, *rest), _ = inputs(40, 2, 1)
    assert not version(kind, q.float(), k.float(), own * 0 - 1, *rest).any()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_logit_that_is_not_a_number_shows(version):
    """In the sums of all keys that the query sees, and in no other head."""
    (q, k, *rest), _ = inputs(40, 2, 2)
    q[0, 1, 20] = torch.nan
    found = version("sum", q.float(), k.float(), *rest)
    assert found[0, 1, :21].isnan().all() and found[0, 1, 21:].isfinite().all() and found[:, 0].isfinite().all()
