"""Layers that hold nothing: what the next passes and columns of padding alone make of them."""

import copy

import pytest
import torch

import ag
from tests.support import batches
from tests.support.batches import columns, row
from tests.support.drawn_scores import registered
from tests.support.held import check, feed

PROMPT = 12
ROW = row(PROMPT + 7, PROMPT)


@pytest.fixture(scope="module", autouse=True)
def _drawn():
    with registered():
        yield


def counts(held):
    """Tokens of each layer, sequences and heads together."""
    return [sum(len(head) for heads in layer for head in heads) for layer in held]


@pytest.mark.parametrize(
    ("name", "lowered", "schedule"),
    [("drawn", 0, "prefill"), ("drawn+criticalkv", 1, "steps:2"), ("drawn+criticalkv", 2, "blocks:5+every")],
)
def test_a_layer_without_tokens_goes_on_as_one_whose_tokens_are_masked(tiny_llama, name, lowered, schedule):
    """One token, three at once, and one again, each of which sees itself; with ``every`` the layer keeps nothing."""
    model, policy = tiny_llama(), ag.policy(f"{name}@global", 1, schedule, lowered=lowered)
    result = feed(ag.EvictionCache(model, policy), model, [ROW], [[PROMPT], [1], [1], [3], [1], [1]])
    check(model, [ROW], result)
    assert counts(result.held[0])[lowered] == 0 and sum(counts(result.held[0])) == 6
    later = [counts(held)[lowered] for held in result.held[1:]]
    assert later == {None: [2, 4, 10, 12, 14], 1: [0] * 5, 2: [2, 0, 0, 2, 0]}[policy.steps]


def step(model, cache, token, real):
    """Feed one column to two sequences, of which ``real`` have a token there; the logits."""
    return batches.step(model, cache, token, torch.cat([cache.valid, torch.tensor(real)[:, None]], 1).long())


@pytest.mark.parametrize(
    ("name", "seed", "options", "positions"),
    [
        ("drawn+criticalkv", 0, {"lowered": 0}, "original"),
        ("tova", 1, {"recent": 0}, "slot"),
        ("expected_attention", 1, {"sinks": 0}, "original"),
    ],
)
def test_padding_alone_meets_a_layer_without_tokens(tiny_llama, name, seed, options, positions):
    """A column in which no sequence has a token changes nothing."""
    model, token = tiny_llama(seed=seed), torch.tensor([[9], [7]])
    cache = ag.EvictionCache(model, f"{name}@global", 1, "every", positions=positions, **options)
    feed(cache, model, [ROW, ROW], [[PROMPT] * 2])
    held, other = columns(cache), copy.deepcopy(cache)
    assert 0 in counts(held)
    step(model, cache, token, [False, False])
    assert columns(cache) == held
    wanted = step(model, other, token, [True, True])
    assert torch.equal(step(model, cache, token, [True, True]), wanted)
    assert columns(cache) == columns(other)
