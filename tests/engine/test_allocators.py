"""Shares of the budget: exact totals, the published rules, and cascading against one decision at the end."""

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ag.engine.allocators.preference import Preference, water_fill
from ag.engine.allocators.pyramid import pyramid
from ag.engine.allocators.rounding import largest_remainder
from tests.support.attention_by_hand import Scene
from tests.support.bounds import hold
from tests.support.candidates import Scripted, best, candidates_of, two_stages


def rounded(shares, total):
    """Largest remainder with fractions; of equal ones the lower layer first."""
    whole = [math.floor(x) for x in shares]
    order = sorted(range(len(shares)), key=lambda i: (-(shares[i] - whole[i]), i))
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole


def filled(preference, total, caps):
    """``min(cap, lambda P)`` with fractions: fill layers up one after the other until the rest is in proportion."""
    total, full = Fraction(min(total, sum(caps))), set()
    while True:
        free = [i for i in range(len(caps)) if i not in full]
        if not free:
            return [Fraction(cap) for cap in caps]
        rest = total - sum(caps[i] for i in full)
        level = rest / sum(Fraction(preference[i]) for i in free)
        over = {i for i in free if level * Fraction(preference[i]) > caps[i]}
        if not over:
            return [Fraction(caps[i]) if i in full else level * Fraction(preference[i]) for i in range(len(caps))]
        full |= over


# ---- largest remainder


def test_remainders_that_differ_in_their_last_bits_are_equal():
    """38 tokens in proportion to 1, 1, 1, 1, 35, 41: remainders .475 four times, then .625 and .475 again."""
    parts = [1, 1, 1, 1, 35, 41]
    shares = torch.tensor([[38 * part / 80 for part in parts]], dtype=torch.float64)
    assert largest_remainder(shares, torch.tensor([38]), torch.full((1, 6), 99)).tolist() == [[1, 1, 0, 0, 17, 19]]


# ---- pyramid


@given(st.integers(1, 400), st.integers(0, 4000), st.integers(1, 40), st.sampled_from([1, 2, 3, 7, 20, 50]))
@settings(max_examples=80)
def test_pyramid_is_a_line_of_exact_total(mean, held, layers, beta):
    got = pyramid(mean, held, layers, beta)
    assert sum(got) == min(mean, held) * layers
    assert all(0 <= x <= held for x in got)
    if held >= mean and layers > 1:
        low = mean // beta
        high = 2 * mean - low
        if high > held:
            low, high = 2 * mean - held, held
        shares = [high - Fraction(high - low, layers - 1) * layer for layer in range(layers)]
        assert got == rounded(shares, mean * layers)
        assert got == sorted(got, reverse=True)


# ---- preference


@pytest.mark.parametrize(("observers", "tau"), [(4, (1.6, 0.4)), (32, (1.0, 1.0))])
@pytest.mark.parametrize(
    "shape",
    [{"lengths": (14, 7), "heads": 6}, {"lengths": (6, 13), "padding": "right", "ragged": True}],
    ids=["left", "right-ragged"],
)
def test_preference_is_entropy_and_variance_of_the_prefix(shape, tau, observers):
    scene = Scene(seed=13, **shape)
    allocator = Preference(tau1=tau[0], tau2=tau[1], observers=observers)

    def preference(reader):
        return allocator.layer_preference(reader.inputs(allocator.needs, {}))

    got, bound = preference(scene.reader), scene.bound(preference)
    assert got.dtype == torch.float64
    for b, n in enumerate(scene.lengths):
        entropy = variance = 0.0
        for h in range(scene.heads):
            a = scene.dense(b, h)[0][-observers:]
            for slot, p in enumerate(scene.held[b][h // scene.group]):
                if p < n - observers:
                    column = [float(x) for x in a[:, slot]]
                    entropy -= sum(x * math.log(x + 1e-10) for x in column)
                    mean = sum(column) / len(column)
                    variance += sum((x - mean) ** 2 for x in column) / (len(column) - 1)
        if entropy:
            hold(got[b], entropy ** (1 / tau[0]) * variance ** (1 / tau[1]), bound[b])
        else:
            assert float(got[b]) > 0  # nothing before the observers: all layers alike


@given(st.data())
@settings(max_examples=80)
def test_water_filling_is_the_capped_proportion(data):
    layers = data.draw(st.integers(1, 10))
    caps = data.draw(st.lists(st.integers(0, 60), min_size=layers, max_size=layers))
    preference = data.draw(st.lists(st.floats(1e-9, 1e9), min_size=layers, max_size=layers))
    total = data.draw(st.integers(0, 400))
    got = water_fill(torch.tensor([preference], dtype=torch.float64), torch.tensor([total]), torch.tensor([caps]))[0]
    wanted = torch.tensor([float(x) for x in filled(preference, total, caps)], dtype=torch.float64)
    # positive numbers: a sum, a product and a quotient; twice for what is added up again
    loose = 2 * (layers + 2) * torch.finfo(torch.float64).eps
    hold(got, wanted, loose * wanted)
    hold(got.sum(), float(min(total, sum(caps))), loose * min(total, sum(caps)))


def random_case(seed):
    """Layers of one length, as a prompt makes them, with preferences that are alike, spread out, or equal."""
    draw = random.Random(seed)
    layers, protected = draw.randint(1, 7), draw.randint(0, 4)
    n = draw.randint(protected + 1, 40)
    capacity = draw.randint(max(protected, 1), n + 3)
    spread = draw.choice([0.0, 1.0, 2.0, 6.0])
    preference = [math.exp(draw.gauss(0, spread)) for _ in range(layers)]
    if draw.random() < 0.3:
        preference = [float(draw.randint(1, 3)) for _ in range(layers)]
    levels = draw.choice([None, 1, 2, 3])
    return layers, n, protected, capacity, preference, levels


def test_cascading_equals_one_decision_at_the_end():
    """A third of the cases with equal preferences and most with tied scores; never much over budget."""
    cut = 0
    for seed in range(50):
        layers, n, protected, capacity, preference, levels = random_case(seed)
        brought = candidates_of([n] * layers, capacity, protected, seed, preference=preference, levels=levels)
        bound = max(capacity, protected) * layers + n + layers  # the budget, one whole layer, rounding
        peak = []
        held = Scripted("preference", brought).run(
            lambda held, peak=peak: peak.append(max(sum(len(layer[g]) for layer in held) for g in range(2)))
        )
        assert max(peak) <= min(bound, layers * n), seed
        total = min((capacity - protected) * layers, (n - protected) * layers)
        counts = rounded(filled(preference, total, [n - protected] * layers), total)
        one_shot = [[best(candidates, g, counts[i]) for g in range(2)] for i, candidates in enumerate(brought)]
        assert held == one_shot, seed
        assert sum(len(layer[0]) for layer in held) == min(capacity, n) * layers
        cut += n > capacity and layers > 2
    assert cut > 20


# ---- global


def best_of_all(brought, capacity, floor):
    """By layer and head: the protected and the floor of each, then the best of all; ties to the first."""
    least, kept, rest = int(capacity * floor), {}, []
    for layer, candidates in enumerate(brought):
        for g, scores in enumerate(candidates.score[0].tolist()):
            safe = {p for p, x in enumerate(scores) if x == math.inf}
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
@settings(max_examples=60)
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
@pytest.mark.parametrize("seed", range(6))
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
            parts = (x[0, g].tolist() for x in (candidates.score, candidates.second, candidates.score == math.inf))
            assert held[layer][g] == two_stages(*parts, counts[layer][g], 0.5)


def test_a_prompt_that_fits_leaves_every_layer_the_mean_of_all_heads():
    fitted = Scripted("global", candidates_of([9] * 3, 12))
    fitted.run()
    assert {layer: x.tolist() for layer, x in fitted.budgets.layer_budget.items()} == {
        layer: [24] for layer in range(3)
    }
    assert not fitted.budgets.pending and not fitted.budgets.pending_by_first
