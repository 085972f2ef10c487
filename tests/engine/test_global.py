"""One top-k over layers and heads: against a plain list of all tokens, cascading, while decoding, in whole caches."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ag
from ag.engine.allocators.base import Ballot, Shares
from ag.engine.allocators.global_ import Global
from ag.errors import UserError
from tests.engine.test_allocators import Scripted, ballots_of
from tests.engine.test_wrappers import two_stages


def best_of_all(ballots, capacity, floor):
    """By layer and head: the protected and the floor of each, then the best of all; ties to the first."""
    least, kept, rest = int(capacity * floor), {}, []
    for layer, ballot in enumerate(ballots):
        for g, scores in enumerate(ballot.score[0].tolist()):
            safe = {p for p, x in enumerate(ballot.protected[0, g].tolist()) if x}
            order = sorted((p for p in range(len(scores)) if p not in safe), key=lambda p, s=scores: (-s[p], p))
            room = max(0, least - len(safe))
            kept[layer, g] = safe | set(order[:room])
            rest += [(-scores[p], layer, g, p) for p in order[room:]]
    total = capacity * len(kept) - sum(map(len, kept.values()))
    for _, layer, g, p in sorted(rest)[: max(0, total)]:
        kept[layer, g].add(p)
    heads = ballots[0].score.shape[1]
    return [[sorted(kept[layer, g]) for g in range(heads)] for layer in range(len(ballots))]


@given(st.integers(0, 10**6))
@settings(max_examples=150)
def test_is_one_top_k_over_everything(seed):
    draw = random.Random(seed)
    layers, protected = draw.randint(1, 6), draw.randint(0, 4)
    n = draw.randint(protected + 1, 30)
    capacity, floor = draw.randint(max(1, protected), n + 3), draw.choice([0.0, 0.2, 0.5, 1.0])
    ballots = ballots_of([n] * layers, capacity, protected, seed % 1000, levels=draw.choice([None, 2, 4]))
    for index, ballot in enumerate(ballots):
        ballot.score = ballot.score * (1 + index % 3)  # layers of different scales
    sizes = []
    held = Scripted("global", ballots, floor=floor).run(
        lambda held: sizes.append(sum(len(tokens) for layer in held for tokens in layer))
    )
    assert held == best_of_all(ballots, capacity, floor)
    assert sizes[-1] == 2 * layers * min(capacity, n)
    assert max(sizes) <= 2 * (layers * capacity + n)  # the budget and one whole layer


@pytest.mark.parametrize(("capacity", "protected"), [(8, 2), (2, 0), (1, 0)])
@pytest.mark.parametrize("seed", range(20))
def test_two_scores_decide_once_too(seed, capacity, protected):
    """The first one shares the budget out over everything, then both fill each head; a layer may get nothing."""
    ballots = ballots_of([25] * 4, capacity, protected, seed)
    ballots[seed % 4].score -= 1.0
    for ballot in ballots:
        ballot.second = torch.rand(ballot.score.shape, generator=torch.Generator().manual_seed(seed + 50))
        ballot.first_share = 0.5
    counts = [[len(tokens) for tokens in layer] for layer in best_of_all(ballots, capacity, 0.0)]
    held = Scripted("global", ballots).run()
    for layer, ballot in enumerate(ballots):
        for g in range(2):
            parts = (x[0, g].tolist() for x in (ballot.score, ballot.second, ballot.protected))
            assert held[layer][g] == two_stages(*parts, counts[layer][g], 0.5)


def test_one_layer_and_one_head_is_the_plain_selection():
    (ballot,) = ballots_of([30], 7, 2, heads=1)
    assert Scripted("global", [ballot]).run() == Scripted("uniform", [ballot]).run()


def test_a_layer_of_larger_scores_gets_more():
    shares = []
    for shift in (-0.5, 0.0, 0.3, 2.0):
        ballots = ballots_of([30] * 3, 10, 1)
        ballots[1].score = ballots[1].score + shift
        held = Scripted("global", ballots).run()
        shares.append(sum(map(len, held[1])))
    assert shares == sorted(shares)
    assert shares[0] < shares[1] < shares[2] <= shares[3] == 56  # 60, less what the others protect


def test_while_decoding_each_layer_keeps_its_total():
    ballots = ballots_of([30] * 3, 10, 1)
    decision = Scripted("global", ballots)
    held = decision.run()
    totals = [sum(map(len, layer)) for layer in held]
    assert {layer: x.tolist() for layer, x in decision.shares.settled.items()} == {i: [n] for i, n in enumerate(totals)}
    assert not decision.shares.open and not decision.shares.votes
    (later,) = ballots_of([24], 10, 1, seed=9)
    for layer, total in enumerate(totals):
        keep = Global().keep_later(layer, later, decision.shares)
        flat = sorted((-later.score[0, g, p], g, p) for g in range(2) for p in range(23))[: total - 2]
        wanted = {(g, p) for _, g, p in flat} | {(0, 23), (1, 23)}
        assert {tuple(x) for x in keep[0].nonzero().tolist()} == wanted
    fitted = Scripted("global", ballots_of([9] * 3, 12))
    fitted.run()
    assert {i: x.tolist() for i, x in fitted.shares.settled.items()} == {i: [24] for i in range(3)}


def test_sequences_do_not_compete_with_each_other():
    alone = [ballots_of([20] * 3, 6, 1, seed) for seed in (1, 2)]
    names = ("score", "protected", "valid", "capacity", "prompt", "due")
    both = [
        Ballot(*(torch.cat([getattr(x, name) for x in pair]) for name in names)) for pair in zip(*alone, strict=True)
    ]
    for due in ([True, True], [True, False]):
        shares, held = Shares([0, 1, 2]), [torch.arange(20).expand(2, 2, 20) for _ in both]
        for layer, ballot in enumerate(both):
            ballot.due = torch.tensor(due)
            for index, keep in Global().keep(layer, ballot, shares).items():
                rows = [list(zip(x, k, strict=True)) for x, k in zip(held[index], keep, strict=True)]
                held[index] = _padded([[x[k].tolist() for x, k in row] for row in rows])
        for b, ballots in enumerate(alone):
            wanted = best_of_all(ballots, 6, 0.0) if due[b] else [[list(range(20))] * 2] * 3
            assert [[x[x >= 0].tolist() for x in layer[b]] for layer in held] == wanted


def _padded(rows):
    width = max(len(x) for row in rows for x in row)
    return torch.tensor([[x + [-1] * (width - len(x)) for x in row] for row in rows])


@pytest.mark.parametrize("schedule", ["prefill", "every", "blocks:7+every"])
@pytest.mark.parametrize("name", ["snapkv", "knorm", "h2o+criticalkv"])
def test_a_cache_holds_the_budget_in_total(tiny_llama, name, schedule):
    model = tiny_llama()
    options = {"window": 3} if name == "snapkv" else {}
    cache = ag.EvictionCache(model, f"{name}@global", 10, schedule, **options)
    model(torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(3)), past_key_values=cache)
    counts = [layer.store.lengths.view(2, -1).sum(1) for layer in cache.evicting_layers]
    assert torch.stack(counts).sum(0).tolist() == [60, 60]
    assert len({int(x) for count in counts for x in count}) > 1  # layers differ
    for _ in range(3):
        model(torch.full((2, 1), 7), past_key_values=cache)
    later = torch.stack([layer.store.lengths.view(2, -1).sum(1) for layer in cache.evicting_layers]).sum(0)
    assert later.tolist() == ([60, 60] if "every" in schedule else [78, 78])


def test_floor_out_of_range():
    with pytest.raises(UserError, match="floor=1.5: expected a share from 0 to 1"):
        ag.policy("knorm@global", 0.5, floor=1.5)
