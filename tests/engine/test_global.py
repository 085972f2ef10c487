"""One top-k over layers and heads: against a plain list of all tokens, cascading, while decoding, in whole caches."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ag.engine.allocators.global_ import Global
from tests.support.candidates import Scripted, candidates_of, two_stages


def best_of_all(brought, capacity, floor):
    """By layer and head: the protected and the floor of each, then the best of all; ties to the first."""
    least, kept, rest = int(capacity * floor), {}, []
    for layer, candidates in enumerate(brought):
        for g, scores in enumerate(candidates.score[0].tolist()):
            safe = {p for p, x in enumerate(candidates.protected[0, g].tolist()) if x}
            order = sorted((p for p in range(len(scores)) if p not in safe), key=lambda p, s=scores: (-s[p], p))
            room = max(0, least - len(safe))
            kept[layer, g] = safe | set(order[:room])
            rest += [(-scores[p], layer, g, p) for p in order[room:]]
    total = capacity * len(kept) - sum(map(len, kept.values()))
    for _, layer, g, p in sorted(rest)[: max(0, total)]:
        kept[layer, g].add(p)
    heads = brought[0].score.shape[1]
    return [[sorted(kept[layer, g]) for g in range(heads)] for layer in range(len(brought))]


@given(st.integers(0, 10**6))
@settings(max_examples=150)
def test_is_one_top_k_over_everything(seed):
    draw = random.Random(seed)
    layers, protected = draw.randint(1, 6), draw.randint(0, 4)
    n = draw.randint(protected + 1, 30)
    capacity, floor = draw.randint(max(1, protected), n + 3), draw.choice([0.0, 0.2, 0.5, 1.0])
    brought = candidates_of([n] * layers, capacity, protected, seed % 1000, levels=draw.choice([None, 2, 4]))
    for index, candidates in enumerate(brought):
        candidates.score = candidates.score * (1 + index % 3)  # layers of different scales
    sizes = []
    held = Scripted("global", brought, floor=floor).run(
        lambda held: sizes.append(sum(len(tokens) for layer in held for tokens in layer))
    )
    assert held == best_of_all(brought, capacity, floor)
    assert sizes[-1] == 2 * layers * min(capacity, n)
    assert max(sizes) <= 2 * (layers * capacity + n)  # the budget and one whole layer


@pytest.mark.parametrize(("capacity", "protected"), [(8, 2), (2, 0), (1, 0)])
@pytest.mark.parametrize("seed", range(20))
def test_two_scores_decide_once_too(seed, capacity, protected):
    """The first one shares the budget out over everything, then both fill each head; a layer may get nothing."""
    brought = candidates_of([25] * 4, capacity, protected, seed)
    brought[seed % 4].score -= 1.0
    for candidates in brought:
        candidates.second = torch.rand(candidates.score.shape, generator=torch.Generator().manual_seed(seed + 50))
        candidates.first_share = 0.5
    counts = [[len(tokens) for tokens in layer] for layer in best_of_all(brought, capacity, 0.0)]
    held = Scripted("global", brought).run()
    for layer, candidates in enumerate(brought):
        for g in range(2):
            parts = (x[0, g].tolist() for x in (candidates.score, candidates.second, candidates.protected))
            assert held[layer][g] == two_stages(*parts, counts[layer][g], 0.5)


def test_while_decoding_each_layer_keeps_its_total():
    brought = candidates_of([30] * 3, 10, 1)
    decision = Scripted("global", brought)
    held = decision.run()
    totals = [sum(map(len, layer)) for layer in held]
    assert {layer: x.tolist() for layer, x in decision.budgets.settled.items()} == {
        i: [n] for i, n in enumerate(totals)
    }
    assert not decision.budgets.open and not decision.budgets.votes
    (later,) = candidates_of([24], 10, 1, seed=9)
    for layer, total in enumerate(totals):
        keep = Global().keep_later(layer, later, decision.budgets)
        flat = sorted((-later.score[0, g, p], g, p) for g in range(2) for p in range(23))[: total - 2]
        wanted = {(g, p) for _, g, p in flat} | {(0, 23), (1, 23)}
        assert {tuple(x) for x in keep[0].nonzero().tolist()} == wanted
    fitted = Scripted("global", candidates_of([9] * 3, 12))
    fitted.run()
    assert {i: x.tolist() for i, x in fitted.budgets.settled.items()} == {i: [24] for i in range(3)}
