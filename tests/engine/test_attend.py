"""Several new queries against what is held: which keys each sees, and the memory that it takes."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ag.engine import attend
from ag.engine.store import Rows
from ag.model.hooks import AttentionCall
from ag.training.fake_step import Live
from tests.support.bounds import bounded, hold

SCALING = 0.3


def drawn(batch, heads, kv_heads, queries, tokens, dim=8, *, uneven=True):
    """Rows of tokens whose ranks have gaps, the new ones last, and queries of the last ranks."""
    make = torch.Generator().manual_seed(tokens)
    rows, seen = batch * kv_heads, tokens + 5
    old = [torch.randperm(seen - queries, generator=make)[: tokens - queries].sort().values for _ in range(rows)]
    ranks = torch.stack([torch.cat([x, torch.arange(seen - queries, seen)]) for x in old]).int()
    valid = torch.ones(rows, tokens, dtype=torch.bool)
    if uneven:  # the first row holds fewer, its new tokens first
        valid[0, queries:] = False
        ranks[0] = ranks[0].flip(0)
        ranks[0, :queries] = ranks[0, :queries].flip(0)
    k, v = (torch.randn(rows, tokens, dim, generator=make, dtype=torch.float64) for _ in "kv")
    gate = torch.rand(rows, tokens, generator=make) < 0.5
    q = torch.randn(batch, heads, queries, dim, generator=make, dtype=torch.float64)
    at = torch.arange(seen - queries, seen).expand(batch, -1)
    return q, Rows(k, v, ranks, valid if uneven else None, gate), at


def by_hand(q, held, at, window=None, recent=0):
    """Pair by pair, in float64."""
    out, rows = torch.zeros_like(q), len(held.ranks)
    for b, h, j in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        row = (b * q.shape[1] + h) * rows // (q.shape[0] * q.shape[1])
        seen = []
        for t, rank in enumerate(held.ranks[row].tolist()):
            distance = int(at[b, j]) - rank
            inside = held.valid is None or bool(held.valid[row, t])
            inside = inside and distance >= 0 and (window is None or distance < window)
            inside = inside and (not recent or bool(held.gate[row, t]) or distance < recent)
            if inside:
                seen.append(t)
        weights = (SCALING * held.keys[row, seen] @ q[b, h, j]).softmax(-1)
        out[b, h, j] = (weights[None] @ held.values[row, seen])[0]
    return out


def exactly(q, held):
    """Queries and rows of which float64 computes with bounds."""
    keys, values = (bounded(x, torch.float64) for x in (held.keys, held.values))
    return bounded(q, torch.float64), held._replace(keys=keys, values=values)


def call_of(q, held, window=None):
    return AttentionCall(torch.nn.Identity(), 0, q, held.keys, held.values, SCALING, window)


OPTIONS = {"plain": {}, "window": {"window": 7}, "flags": {"recent": 4}, "all": {"window": 9, "recent": 3}}


@pytest.mark.parametrize("pairs", [attend.PAIRS, 700, 1], ids=["at once", "few at once", "one by one"])
@pytest.mark.parametrize("queries", [3, attend.FEW + 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_what_each_query_sees(monkeypatch, name, queries, pairs):
    monkeypatch.setattr(attend, "PAIRS", pairs)
    q, held, at = drawn(2, 4, 2, queries, 30)
    options = dict(OPTIONS[name])
    want = by_hand(*exactly(q, held), at, **options)
    found = attend.attend_rows(call_of(q, held, options.pop("window", None)), held, at, **options)
    hold(found, want)


@pytest.mark.parametrize("uneven", [False, True])
def test_one_query_sees_all_that_is_held(uneven):
    q, held, at = drawn(2, 4, 2, 1, 30, uneven=uneven)
    hold(attend.attend_rows(call_of(q, held), held, at), by_hand(*exactly(q, held), at))


@pytest.mark.parametrize("options", [{}, {"window": 4096, "recent": 9}], ids=["plain", "flags in a window"])
def test_a_turn_after_100_000_tokens_takes_little_memory(options):
    """On fake tensors; a mask of 256 queries for each query head would be 0.8 GB."""
    tokens, queries, kv_heads = 100_000, 1024, 8
    with FakeTensorMode():
        half = {"dtype": torch.bfloat16}
        k, q = torch.empty(kv_heads, tokens, 128, **half), torch.empty(1, 32, queries, 128, **half)
        ranks, at = torch.empty(kv_heads, tokens, dtype=torch.int32), torch.empty(1, queries, dtype=torch.long)
        gate = torch.empty(kv_heads, tokens, dtype=torch.bool)
        held = Rows(k, k, ranks, gate if options else None, gate if options else None)
        given = torch.nn.Module()
        for name, x in {"k": k, "q": q, "ranks": ranks, "at": at, "gate": gate}.items():
            given.register_buffer(name, x)
        with Live([given]) as live:
            attend.attend_rows(call_of(q, held, options.get("window")), held, at, recent=options.get("recent", 0))
    outputs, few = 2 * q.nbytes, 2 * ranks.nbytes  # in parts and whole; what has no queries
    assert live.peak <= outputs + few + 3 * attend.PAIRS  # a mask, and what is made of it, or two masks
