"""Statistics of attention: the reference against the definition, pair by pair, and the other versions against it."""

import itertools
import math
from collections import defaultdict

import pytest
import torch

from ag.kernels.attention_stats import attention_stats, cpu, reference
from ag.kernels.attention_stats.reference import STATISTICS
from ag.kernels.softmax import PLAIN, Softmax
from tests.support.bounds import near, right
from tests.support.compiled import INTERPRETED, needs, versions
from tests.support.hard import HARD, SCALING, hard
from tests.support.memory import Largest

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
SHAPES = [(37, 2, 1, 20)] if INTERPRETED else [(300, 6, 2, 20), (127, 2, 2, 12), (1, 2, 1, 12)]
kinds = pytest.mark.parametrize("kind", STATISTICS)
fast = versions("attention_stats", "cpp", "triton")


def given(length, heads, kv_heads, dim=12, *, padding=None, queries="all", newest=None, factors=None, scattered=False,
          softmax=False, dtype=torch.float32, **options):  # fmt: skip
    """Return q, k and the other arguments; ``factors``: the number of last queries whose factor is 0.

    ``scattered``: each head holds its keys in another order, and no key of a third of the token indices.
    """
    generator = torch.Generator().manual_seed(length * 7 + heads)
    q, k = (2 * torch.randn(2, h, length, dim, generator=generator).to(dtype) for h in (heads, kv_heads))
    valid = torch.ones(2, length, dtype=torch.bool)
    if padding:
        valid[1, length - length // 3 :] = False
        valid = valid.flip(1) if padding == "left" else valid
    counting = {"all": valid, "last": torch.arange(length) >= length - 5, "some": torch.arange(length) % 3 > 0}[queries]
    first, token_indices = length - min(newest or length, length), torch.arange(length)
    own, held = token_indices.where(counting & valid, -1)[:, first:], token_indices.where(valid, -1)[:, None]
    if scattered:
        order = torch.rand(2, kv_heads, length, generator=generator).argsort(-1)
        held = held.expand(-1, kv_heads, -1).gather(2, order)
        held = held.where(torch.rand(held.shape, generator=generator) < 0.7, -1)
        k[held < 0] = torch.nan  # what lies in free slots may be no number
    if factors is not None:
        options["factors"] = torch.rand(2, length - first, generator=generator) * 3 + 0.1
        options["factors"][:, -factors:] *= factors == 0
    if softmax:
        options["softmax"] = Softmax(2.0, torch.linspace(-1, 2, heads))
    return (q[:, :, first:], k, own, held, dim**-0.5), options


def loops(kind, q, k, own, held, scaling, window=None, skip=0, factors=None, softmax=PLAIN):
    """The definition, one pair at a time."""
    paid = defaultdict(list)
    for b, h, j in itertools.product(*map(range, q.shape[:3])):
        of_kv, token_index = h * k.shape[1] // q.shape[1], int(own[b, j])
        token_indices = held[b, of_kv % held.shape[1]].tolist()
        oldest = -1 if window is None else token_index - window
        seen = [t for t, index in enumerate(token_indices) if max(oldest + 1, 0) <= index <= token_index]
        logits = [scaling * float(q[b, h, j] @ k[b, of_kv, t]) for t in seen]
        logits = logits if softmax.cap is None else [softmax.cap * math.tanh(s / softmax.cap) for s in logits]
        beside = 0.0 if softmax.sinks is None else math.exp(float(softmax.sinks[h]))
        given = [math.exp(s) for s in logits]
        for t, weight in zip(seen, given, strict=True):
            if token_index - token_indices[t] >= skip:
                factor = 1.0 if factors is None else float(factors[b, j])
                paid[b, h, t].append(factor * weight / (sum(given) + beside))
    out = torch.zeros(*q.shape[:2], k.shape[2], dtype=q.dtype)
    for place, values in paid.items():
        out[place] = {"sum": sum, "max": max, "squares": lambda x: sum(y * y for y in x)}[kind](values)
    return out


def check(version, kind, arguments, options):
    """Hold a version to the reference in float64."""
    q, k, *rest = arguments
    (want,) = right(lambda q, k: [reference.attention_stats(kind, q, k, *rest, **options)], q, k)
    got = version(kind, q, k, *rest, **options)
    assert got.dtype == torch.float32
    near(got, want, kind, q.dtype if INTERPRETED else torch.float32)


@kinds
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_equals_loops(kind, case):
    (q, k, *rest), options = given(23, 4, 2, **case)
    found = reference.attention_stats(kind, q.double(), k.double(), *rest, **options)
    torch.testing.assert_close(found, loops(kind, q.double(), k.double(), *rest, **options), rtol=1e-9, atol=1e-12)


def chosen():
    """One shape a case by day; in the interpreter two cases that have every mask."""
    for n, shape in enumerate(SHAPES):
        for i, case in enumerate(CASES):
            by_day = case in ("all", "later-all") if INTERPRETED else n == 0 or i % 2 == n % 2
            yield pytest.param(shape, case, marks=[] if by_day else pytest.mark.nightly)


@fast
@kinds
@pytest.mark.parametrize(("shape", "case"), list(chosen()), ids=str)
def test_versions_equal_the_reference(version, kind, shape, case):
    check(version, kind, *given(*shape, **CASES[case]))


@fast
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.bfloat16], ids=str)
def test_half_precision(version, dtype):
    check(version, "sum", *given(37, 2, 1, 32, skip=2, dtype=dtype))


def test_the_reference_under_autocast_is_the_reference():
    arguments, options = given(37, 2, 1, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found = reference.attention_stats("sum", *arguments, **options)
    assert torch.equal(found, reference.attention_stats("sum", *arguments, **options))


@fast
def test_strides_and_odd_sizes(version):
    (q, k, own, held, scaling), options = given(63, 4, 2, 60, padding="left", queries="some")
    q, own, held = q.transpose(1, 2).contiguous().transpose(1, 2), own.mT.contiguous().mT, held.mT.contiguous().mT
    check(version, "max", (q, k, own, held, scaling), options)


@fast
@pytest.mark.parametrize("name", HARD if not INTERPRETED else HARD[1:2])
def test_hard_inputs(version, name):
    length = 40 if INTERPRETED else 300
    (q, k, *_), token_indices = hard(name, length), torch.arange(length)[None]
    check(version, "squares", (q, k, token_indices, token_indices[None], SCALING), {})


@needs(cpu.KERNEL)
@kinds
def test_cpp_does_not_depend_on_the_number_of_threads(monkeypatch, kind):
    arguments, options = given(1100, 3, 1, 20, padding="left", window=700, queries="some", factors=3)
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(cpu.attention_stats(kind, *arguments, **options))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert int((found[0] > 0).sum()) > 4000


@versions("attention_stats", "cpp", "reference", "triton")
@kinds
def test_nan_shows_and_queries_that_do_not_count_add_nothing(version, kind):
    """In the statistics of all keys that the query sees, and in no other head."""
    (q, k, own, *rest), _ = given(40, 2, 2)
    assert not version(kind, q, k, own * 0 - 1, *rest).any()
    q[0, 1, 20] = torch.nan
    found = version(kind, q, k, own, *rest)
    assert found[0, 1, :21].isnan().all() and found[0, 1, 21:].isfinite().all() and found[:, 0].isfinite().all()


def test_memory_is_linear_in_the_length():
    sizes = []
    for length in (512, 1024):
        arguments, _ = given(length, 2, 1)
        with Largest() as largest:
            attention_stats("sum", *arguments)
        sizes.append(largest.size)
    assert sizes[1] <= 2.05 * sizes[0]
