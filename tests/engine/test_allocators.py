"""Shares of the budget: exact totals, the published rules, and cascading against one decision at the end."""

import math
import random
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ag
from ag.engine.allocators.base import Ballot
from ag.engine.allocators.heads import Heads
from ag.engine.allocators.preference import PUBLISHED_TAU, Preference, published_tau, water_fill
from ag.engine.allocators.pyramid import pyramid
from ag.engine.allocators.rounding import largest_remainder
from ag.engine.decide import Decision
from ag.engine.observe import Context, Keys, Observation, Queries
from ag.engine.select import select_over_heads
from ag.errors import UserError
from ag.kernels.row_worst import cpu
from tests.support.attention_by_hand import Scene
from tests.support.bounds import hold
from tests.support.compiled import needs


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


def test_equal_remainders_go_to_the_lower_layer():
    shares = torch.tensor([[1.5, 2.5, 3.5, 0.5], [0.25, 0.5, 0.25, 1.0]], dtype=torch.float64)
    got = largest_remainder(shares, torch.tensor([8, 2]), torch.full((2, 4), 9))
    assert got.tolist() == [[2, 3, 3, 0], [0, 1, 0, 1]]


def test_remainders_that_differ_in_their_last_bits_are_equal():
    """38 tokens in proportion to 1, 1, 1, 1, 35, 41: remainders .475 four times, then .625 and .475 again."""
    parts = [1, 1, 1, 1, 35, 41]
    shares = torch.tensor([[38 * part / 80 for part in parts]], dtype=torch.float64)
    assert largest_remainder(shares, torch.tensor([38]), torch.full((1, 6), 99)).tolist() == [[1, 1, 0, 0, 17, 19]]


def test_rounding_stays_under_the_caps():
    shares = torch.tensor([[3.0, 2.4, 2.6]], dtype=torch.float64)
    assert largest_remainder(shares, torch.tensor([8]), torch.tensor([[3, 9, 9]])).tolist() == [[3, 2, 3]]


@given(st.data())
@settings(max_examples=200)
def test_rounding_is_exact_and_fair(data):
    layers = data.draw(st.integers(1, 12))
    parts = data.draw(st.lists(st.integers(1, 50), min_size=layers, max_size=layers))
    total = data.draw(st.integers(0, 300))
    shares = [Fraction(part * total, sum(parts)) for part in parts]
    got = largest_remainder(
        torch.tensor([[float(x) for x in shares]], dtype=torch.float64),
        torch.tensor([total]),
        torch.full((1, layers), 1000),
    )
    assert got.tolist() == [rounded(shares, total)]


# ---- pyramid


def official_pyramid(mean, held, layers, beta):
    """PyramidKV's own integers (KVCache-Factory): the step is rounded down, so that the total overshoots."""
    low = mean // beta
    high = 2 * mean - low
    if high >= held:
        high, low = held, 2 * mean - held
    step = (high - low) // (layers - 1)
    return [high - layer * step for layer in range(layers)]


@pytest.mark.parametrize(
    ("budget", "window", "layers", "overshoot"), [(128, 8, 32, 4.6), (128, 8, 28, 5.0), (512, 32, 80, 4.5)]
)
def test_pyramid_keeps_the_total_that_the_official_code_overshoots(budget, window, layers, overshoot):
    official = official_pyramid(budget - window, 8000, layers, 20)
    mine = pyramid(budget - window, 8000, layers)
    share = 100 * (sum(official) / (layers * (budget - window)) - 1)
    assert round(share, 1) == overshoot  # of what is shared out; the window comes on top
    assert sum(mine) + layers * window == layers * budget
    assert mine[0] == official[0] == 2 * (budget - window) - (budget - window) // 20
    assert all(0 <= theirs - own <= layers for theirs, own in zip(official, mine, strict=True))
    assert mine[-1] == (budget - window) // 20


@given(st.integers(1, 400), st.integers(0, 4000), st.integers(1, 40), st.sampled_from([1, 2, 3, 7, 20, 50]))
@settings(max_examples=300)
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


def test_beta_of_one_is_uniform():
    assert pyramid(37, 500, 11, beta=1) == [37] * 11


def ballots_of(lengths, capacity, protected=0, seed=0, heads=2, preference=None, levels=None):
    """One ballot per layer of a batch of one, ``lengths`` tokens each; ``levels`` distinct scores make ties."""
    make = torch.Generator().manual_seed(seed)
    result = []
    for layer, n in enumerate(lengths):
        score = torch.rand(1, heads, n, generator=make)
        if levels:
            score = (score * levels).floor()
        guard = (torch.arange(n) >= n - protected).expand(1, heads, n)
        wish = None if preference is None else torch.tensor([preference[layer]], dtype=torch.float64)
        valid = torch.ones(1, heads, n, dtype=torch.bool)
        numbers = torch.tensor([capacity]), torch.tensor([n])
        result.append(Ballot(score, guard, valid, *numbers, due=torch.tensor([True]), preference=wish))
    return result


class Scripted(Decision):
    """A decision whose layers show ready-made ballots."""

    def __init__(self, allocator, ballots, **options):
        super().__init__(ag.policy(f"knorm@{allocator}", budget=1, **options), list(range(len(ballots))))
        self.script = ballots

    def _ballot(self, seen, due, records):
        return self.script[seen.layer]

    def show(self, layer):
        """Show one layer; return the masks."""
        return self.decide(SimpleNamespace(layer=layer, decoding=False, q=self.script[layer].score))

    def run(self, watch=lambda held: None):
        """Show all layers; return the tokens that each head of each layer holds at the end."""
        held = []
        for layer, ballot in enumerate(self.script):
            held.append([list(range(ballot.score.shape[2])) for _ in range(ballot.score.shape[1])])
            watch(held)
            for index, keep in self.show(layer).items():
                for g, tokens in enumerate(held[index]):
                    flags = keep[0, g].tolist()
                    assert not any(flags[len(tokens) :])
                    held[index][g] = [t for t, flag in zip(tokens, flags, strict=False) if flag]
            watch(held)
        return held


def best(ballot, g, count):
    """The protected and the ``count`` best others, ties to the lower index."""
    n = ballot.score.shape[2]
    rivals = [p for p in range(n) if not ballot.protected[0, g, p]]
    chosen = sorted(rivals, key=lambda p: (-float(ballot.score[0, g, p]), p))[:count]
    return sorted({*chosen, *(p for p in range(n) if ballot.protected[0, g, p])})


@pytest.mark.parametrize(
    ("n", "regime"),
    [(30, "all"), (40, "even"), (45, "even"), (63, "even"), (64, "pyramid"), (80, "pyramid"), (500, "pyramid")],
)
def test_the_regimes_of_pyramidkv(n, regime):
    """C = 40 of which 8 are the window: T = 32. N < C: all stay; C <= N < 2T: C each; else the pyramid."""
    held = Scripted("pyramid", ballots_of([n] * 6, 40, protected=8)).run()
    counts = [{len(tokens) for tokens in layer} for layer in held]
    if regime == "pyramid":
        shares = pyramid(32, n - 8, 6)
        assert counts == [{share + 8} for share in shares]
        assert sum(shares) == 6 * 32
        assert shares[0] > 40
    else:
        assert counts == [{n if regime == "all" else 40}] * 6


def test_uniform_keeps_the_budget_in_every_layer():
    ballots = ballots_of([25] * 4, 10, protected=3)
    for layer, ballot in zip(Scripted("uniform", ballots).run(), ballots, strict=True):
        assert layer == [best(ballot, g, 7) for g in range(2)]


# ---- preference


def test_the_published_temperatures():
    """``model2tau.json`` of antgroup/cakekv, all of it."""
    table = {
        "llama3.1-8b-128k": ((1.6, 0.6), (1.6, 0.4)),
        "llama2-7b-chat-4k": ((0.9, 2.3), (1.9, 1.8)),
        "llama2-13b-chat-4k": ((1.8, 2.0), (0.5, 0.4)),
        "mistral-0.3-7b-32k": ((1.0, 0.8), (0.8, 0.5)),
        "qwen2.5-7b-instruct": ((0.4, 0.6), (1.5, 0.6)),
    }
    for model, (small, large) in table.items():
        assert (published_tau(model, 128), published_tau(model, 1024)) == (small, large)
    assert len(PUBLISHED_TAU) == 2 * len(table)
    assert (Preference().tau1, Preference().tau2) == (1.0, 1.0)


@pytest.mark.parametrize(("model", "tokens"), [("llama3.1-8b-128k", 512), ("gpt2", 128)])
def test_an_unpublished_temperature_is_refused(model, tokens):
    with pytest.raises(UserError, match=f"tau.* {model} at {tokens}.*llama2-7b-chat-4k at 1024"):
        published_tau(model, tokens)


@pytest.mark.parametrize("observers", [2, 4, 32])
@pytest.mark.parametrize("tau", [(1.0, 1.0), (1.6, 0.4)])
@pytest.mark.parametrize(
    "shape",
    [{"lengths": (12,)}, {"lengths": (14, 7), "heads": 6}, {"lengths": (6, 13), "padding": "right", "ragged": True}],
    ids=["one", "left", "right-ragged"],
)
def test_preference_is_entropy_and_variance_of_the_prefix(shape, tau, observers):
    scene = Scene(seed=13, **shape)
    allocator = Preference(tau1=tau[0], tau2=tau[1], observers=observers)
    got, bound = allocator.wish(scene.seen), scene.bound(allocator.wish)
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


def test_a_row_prefers_what_it_prefers_alone():
    """Section 13, point 12: no mixing in a batch."""
    batch = Scene(seed=13, lengths=(20, 9))
    left = batch.seen
    ranks = torch.arange(9).expand(1, 2, 9)
    alone = Observation(
        keys=Keys(k=left.k[1:, :, :9], v=left.v[1:, :, :9], ranks=ranks, valid=torch.ones(1, 2, 9).bool()),
        queries=Queries(q=left.q[1:, :, -9:], ranks=ranks[:, 0], valid=torch.ones(1, 9).bool()),
        context=Context(scaling=left.scaling),
    )
    allocator = Preference(observers=4)
    hold(allocator.wish(alone)[0], allocator.wish(left)[1], 2 * batch.bound(allocator.wish)[1])


def test_water_filling():
    got = water_fill(
        torch.tensor([[1.0, 1.0, 2.0], [1.0, 9.0, 2.0], [3.0, 1.0, 1.0]], dtype=torch.float64),
        torch.tensor([12, 12, 90]),
        torch.tensor([[20, 20, 20], [20, 6, 20], [5, 6, 7]]),
    )
    assert got.tolist() == [[3, 3, 6], [2, 6, 4], [5, 6, 7]]


@given(st.data())
@settings(max_examples=300)
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


@pytest.mark.parametrize("version", ["reference", pytest.param("cpp", marks=needs(cpu.KERNEL))])
def test_a_layer_that_wants_nothing_is_left_with_nothing(version, monkeypatch):
    """And those that come after it share what there is."""
    monkeypatch.setenv("AG_KERNELS", version)
    ballots = ballots_of([20] * 4, 3, preference=[1.0, 1e-12, 2.0, 1.0])
    held = Scripted("preference", ballots).run()
    assert held == [[best(ballot, g, n) for g in range(2)] for ballot, n in zip(ballots, [3, 0, 6, 3], strict=True)]


@pytest.mark.slow
def test_cascading_equals_one_decision_at_the_end():
    """300 random cases, a third of them with equal preferences and most with tied scores; never much over budget."""
    cut = 0
    for seed in range(300):
        layers, n, protected, capacity, preference, levels = random_case(seed)
        ballots = ballots_of([n] * layers, capacity, protected, seed, preference=preference, levels=levels)
        bound = max(capacity, protected) * layers + n + layers  # the budget, one whole layer, rounding
        peak = []
        held = Scripted("preference", ballots).run(
            lambda held, peak=peak: peak.append(max(sum(len(layer[g]) for layer in held) for g in range(2)))
        )
        assert max(peak) <= min(bound, layers * n), seed
        total = min((capacity - protected) * layers, (n - protected) * layers)
        counts = rounded(filled(preference, total, [n - protected] * layers), total)
        one_shot = [[best(ballot, g, counts[i]) for g in range(2)] for i, ballot in enumerate(ballots)]
        assert held == one_shot, seed
        assert sum(len(layer[0]) for layer in held) == min(capacity, n) * layers
        cut += n > capacity and layers > 2
    assert cut > 150


def test_cascading_holds_the_budget_and_one_layer():
    """Twelve layers of 100 tokens, 10 each on average: the peak is 120 + 100 (+ 1 a layer), not 1,200."""
    ballots = ballots_of([100] * 12, 10, preference=[float(i % 5 + 1) for i in range(12)])
    sizes = []
    Scripted("preference", ballots).run(lambda held: sizes.append(sum(len(layer[0]) for layer in held)))
    assert 210 <= max(sizes) <= 120 + 100 + 12
    assert sizes[-1] == 120


def test_rows_of_a_batch_share_their_budgets_apart():
    """Two sequences of different lengths and preferences decide together what they decide alone."""
    alone = []
    for seed, (n, preference) in enumerate([(30, [1.0, 5.0, 2.0]), (18, [4.0, 0.1, 1.0])]):
        alone.append(ballots_of([n] * 3, 9, 2, seed, preference=preference))
    together = []
    for first, second in zip(*alone, strict=True):
        pad = (0, 12)
        parts = [
            torch.cat([getattr(first, x), torch.nn.functional.pad(getattr(second, x), pad)])
            for x in ("score", "protected", "valid")
        ]
        wish = torch.cat([first.preference, second.preference])
        numbers = torch.tensor([9, 9]), torch.tensor([30, 18])
        together.append(Ballot(*parts, *numbers, due=torch.tensor([True, True]), preference=wish))
    single = [Scripted("preference", ballots).run() for ballots in alone]
    decision = Scripted("preference", together)
    held = []
    for layer in range(3):
        held.append([[list(range(n))] * 2 for n in (30, 18)])
        for index, keep in decision.show(layer).items():
            held[index] = [
                [
                    [t for t, flag in zip(tokens, keep[b, g].tolist(), strict=False) if flag]
                    for g, tokens in enumerate(row)
                ]
                for b, row in enumerate(held[index])
            ]
    for b in range(2):
        assert [layer[b] for layer in held] == single[b]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("allocator", ["uniform", "pyramid", "preference", "heads"])
def test_every_allocator_keeps_exactly_the_budget(allocator, seed):
    draw = random.Random(seed)
    for _ in range(10):
        layers, protected = draw.randint(1, 9), draw.randint(0, 5)
        n = draw.randint(protected + 1, 60)
        capacity = draw.randint(max(1, protected), n + 5)
        preference = [math.exp(draw.gauss(0, 2)) for _ in range(layers)]
        ballots = ballots_of([n] * layers, capacity, protected, draw.random().__hash__() % 2**31, preference=preference)
        held = Scripted(allocator, ballots).run()
        assert sum(len(tokens) for layer in held for tokens in layer) == 2 * layers * min(capacity, n)
        for layer, ballot in zip(held, ballots, strict=True):
            for g, tokens in enumerate(layer):
                assert tokens == sorted(set(tokens))
                assert set(range(n - protected, n)) <= set(tokens)
                assert tokens == best(ballot, g, len(tokens) - protected)


def test_budgets_settle_for_decoding():
    """Section 13, point 19: the budgets of the prompt's end stay; a prompt that fitted leaves C for every layer."""
    for allocator in ("pyramid", "preference"):
        wishes = [1.0, 8.0, 3.0, 2.0]
        long = Scripted(allocator, ballots_of([60] * 4, 12, 2, preference=wishes))
        held = long.run()
        assert {i: x.tolist() for i, x in long.shares.settled.items()} == {i: [len(x[0])] for i, x in enumerate(held)}
        assert len({len(x[0]) for x in held}) > 1
        fitted = Scripted(allocator, ballots_of([9] * 4, 12, 2, preference=wishes))
        fitted.run()
        assert {i: x.tolist() for i, x in fitted.shares.settled.items()} == {i: [12] for i in range(4)}


# ---- heads


def over_heads(score, protected, valid, capacity, floor):
    """One sequence: the protected, the floor of each head, then the best over all heads; lower head, lower index."""
    heads, n = len(score), len(score[0])
    least, kept = int(capacity * floor), []
    for g in range(heads):
        mine = {p for p in range(n) if protected[g][p] and valid[g][p]}
        rivals = sorted((p for p in range(n) if valid[g][p] and p not in mine), key=lambda p, g=g: (-score[g][p], p))
        kept.append(mine | set(rivals[: max(0, least - len(mine))]))
    rest = [(-score[g][p], g, p) for g in range(heads) for p in range(n) if valid[g][p] and p not in kept[g]]
    for _, g, p in sorted(rest)[: max(0, heads * capacity - sum(map(len, kept)))]:
        kept[g].add(p)
    return [sorted(x) for x in kept]


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("ties", [False, True])
def test_heads_share_a_layer(floor, ties):
    make, draw = torch.Generator().manual_seed(3), random.Random(4)
    for _ in range(40):
        heads, n = draw.randint(1, 5), draw.randint(4, 30)
        capacity, fixed = draw.randint(3, n), draw.randint(0, 3)
        score = torch.rand(1, heads, n, generator=make) * torch.arange(1, heads + 1)[:, None]
        score = (score * 3).floor() if ties else score
        valid = torch.rand(1, heads, n, generator=make) < draw.choice([0.6, 1.0, 1.0])
        protected = (torch.arange(n) < fixed).expand(1, heads, n)
        keep = select_over_heads(score, protected, valid, torch.tensor([capacity]), floor)[0]
        wanted = over_heads(*(x[0].tolist() for x in (score, protected, valid)), capacity, floor)
        assert [x.nonzero().flatten().tolist() for x in keep] == wanted
        assert int(keep.sum()) == min(heads * capacity, int(valid.sum()))


def test_heads_are_uneven_with_a_floor():
    score = torch.stack([torch.full((50,), 0.1), torch.full((50,), 0.9)])[None]
    guard = torch.zeros(1, 2, 50, dtype=torch.bool)
    keep = select_over_heads(score, guard, ~guard, torch.tensor([22]), Heads().floor)[0]
    assert keep.sum(1).tolist() == [4, 40]  # floor(0.2 x 22)
    assert keep[0].nonzero().flatten().tolist() == [0, 1, 2, 3]
