"""Tokens that the caller protects stay under every policy, and the rest is decided as before."""

import pytest
import torch

import ag
from ag.errors import UserError
from tests.support.batches import columns, row
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

SPANS = [(3, 9), (20, 22)]
INSIDE = {*range(3, 9), 20, 21}
POLICIES = {
    "heads": ("snapkv@heads", 16, "prefill", {"window": 4}),
    "global": ("knorm@global", 16),
    "blocks": ("keydiff", 14, "blocks:8+every"),
    "wrapped": ("tova+caote", 14),
}


@pytest.fixture
def model(tiny_llama):
    return tiny_llama()


@torch.no_grad()
def read(model, ids, *spec, spans=SPANS, steps=9, **options):
    """Read prompts, protected, and some tokens behind them."""
    cache = ag.EvictionCache(model, *spec[:3], **(spec[3] if len(spec) > 3 else {}), **options)
    if spans is not None:
        cache.protect(spans)
    model(**(ids if isinstance(ids, dict) else {"input_ids": ids[None]}), past_key_values=cache)
    step = ag.StepRunner(model, cache)
    for number in range(steps):
        step(torch.full((len(cache.valid), 1), 7 + number))
    return cache


def held(cache, sequence=0):
    """Return the sets of own tokens that each layer and head holds."""
    return [{*kept} for layer in columns(cache) for kept in layer[sequence]]


@pytest.mark.parametrize("name", POLICIES)
def test_they_stay_and_count_in_the_budget(model, name):
    spec = POLICIES[name]
    with_spans, without = (read(model, row(40), *spec, spans=spans) for spans in (SPANS, None))
    assert all(kept >= INSIDE for kept in held(with_spans))
    assert not all(kept >= INSIDE for kept in held(without))
    assert sum(map(len, held(with_spans))) == sum(map(len, held(without)))


@pytest.mark.parametrize("covers", ["prompt", "all"])
def test_flags_are_set_for_them(model, covers):
    gates = gates_for(model, kind="mlp", covers=covers, recent_tokens=4, prefill="dense", bias=-0.3)
    ag.attach(model, gates)
    with_spans, without = (held(read(model, row(40), "flags", spans=spans, steps=0)) for spans in (SPANS, None))
    assert [kept | INSIDE for kept in without] == with_spans != without
    assert all(kept >= INSIDE for kept in held(read(model, row(40), "flags")))


@torch.no_grad()
@pytest.mark.parametrize("spans", [(SPANS, None), ([(0, 9)], SPANS)])
def test_caches_that_are_added_keep_their_own(model, spans):
    pool, spec, rows = ag.Pool(model, 2**22), ("h2o", 20, "every"), [row(40, 1), row(29, 2)]
    alone = [held(read(model, text, *spec, spans=own)) for text, own in zip(rows, spans, strict=True)]
    one, other = (
        read(model, text, *spec, spans=own, steps=0, pool=pool) for text, own in zip(rows, spans, strict=True)
    )
    one.add(other)
    step = ag.StepRunner(model, one)
    for number in range(9):
        step(torch.full((2, 1), 7 + number))
    assert [held(one, i) for i in range(2)] == alone


def test_more_of_them_than_the_budget_has(model):
    with pytest.warns(ag.errors.BudgetWarning, match="30 tokens per KV head .*protect"):
        assert all(kept >= set(range(30)) for kept in held(read(model, row(40), "knorm", 12, spans=[(0, 30)])))


@pytest.mark.parametrize("spans", [[(4, 4)], [3, 4], [[(0, 1, 2)]], [(0, 10**23)], [[(0, 2**40)]], [(False, True)]])
def test_pairs_that_are_none(model, spans):
    with refuses(UserError, "protect", "(0, 40)"):
        ag.EvictionCache(model, "h2o", 12).protect(spans)


@torch.no_grad()
@pytest.mark.parametrize("spec", ["tova", "tova@heads", "flags"])
def test_what_was_decided_is_not_protected_afterwards(model, spec):
    """Some heads may have lost the token, or it has its flag: such spans are refused, and nothing changes."""
    if spec == "flags":
        ag.attach(model, gates_for(model, recent_tokens=4, covers="all"))
    cache = ag.EvictionCache(model, spec, *(() if spec == "flags" else (8, "every")))
    cache.protect([(0, 3)])
    model(row(20)[None], past_key_values=cache)
    with refuses(UserError, "protect", "first 20 tokens of sequence 0", "token 5", "cache.reset()"):
        cache.protect([(0, 3), (5, 7)])
    cache.protect([(0, 2), (22, 24)])
    for number in range(20):
        model(torch.tensor([[7 + number]]), past_key_values=cache)
    assert all(kept >= {0, 1, 22, 23} for kept in held(cache))
    if spec == "tova":
        assert all(len(kept) == 8 for kept in held(cache))


@torch.no_grad()
@pytest.mark.parametrize("spec", [("full",), ("h2o", 30, "every")])
def test_what_is_all_held_may_be_protected(model, spec):
    cache = ag.EvictionCache(model, *spec)
    model(row(20)[None], past_key_values=cache)
    cache.protect([(5, 7)])
    for number in range(60):
        model(torch.tensor([[7 + number]]), past_key_values=cache)
    assert all(kept >= {5, 6} for kept in held(cache))
