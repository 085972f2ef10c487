"""Wrappers against what they stand for: removing a token, shrinking a pair, autograd; in float64."""

import math
from copy import copy
from dataclasses import replace

import pytest
import torch

import ag
from ag.engine.allocators.base import Ballot
from ag.engine.allocators.heads import Heads
from ag.engine.observe import Context, Observation
from ag.engine.rows import AttentionRows
from ag.engine.scorers.cake import Cake
from ag.engine.scorers.controls import KNorm
from ag.engine.scorers.gates import Gates
from ag.engine.scorers.h2o import H2O
from ag.engine.scorers.scissorhands import Scissorhands
from ag.engine.scorers.snapkv import SnapKV
from ag.engine.scorers.tova import Tova
from ag.engine.wrappers import WRAPPERS
from ag.engine.wrappers.caote import Caote, FastCaote, removal_error
from ag.engine.wrappers.criticalkv import CriticalKV
from ag.engine.wrappers.obcache import OBCacheJoint, OBCacheKey, OBCacheValue, joint_error, key_error, value_error
from ag.engine.wrappers.vatp import Vatp
from ag.kernels.row_statistics import Values, cpu
from tests.support.attention_by_hand import Scene, agree, group_mean, pool
from tests.support.bounds import bounded, conditioned, hold
from tests.support.compiled import needs

needs_compiler = needs(cpu.KERNEL)

SCENES = {
    "one": {"lengths": (10,)},
    "group3-left": {"lengths": (11, 5, 1), "heads": 6},
    "right": {"lengths": (4, 12), "padding": "right"},
    "ragged": {"lengths": (15, 6), "ragged": True},
    "sharp": {"lengths": (10,), "sharp": 6.0},
}
PARTS = {"value": (1.0, 0.0), "key": (0.0, 1.0), "joint": (1.0, 1.0)}  # how much of v and of k is pruned
CLOSED = {"value": value_error, "key": key_error, "joint": joint_error}
OBCACHE = {"value": OBCacheValue, "key": OBCacheKey, "joint": OBCacheJoint}
ROW_BASES = {
    "h2o": H2O(recent=2),
    "h2o-window": H2O(window=3),
    "scissorhands": Scissorhands(window=4, recent=3),
    "tova": Tova(),
    "tova-head": Tova(scope="kv_head"),
    "snapkv": SnapKV(window=3, kernel=3),
    "snapkv-avg": SnapKV(window=2, kernel=5, pooling="avg", sinks=1),
    "cake": Cake(window=3),
}


@pytest.fixture(params=SCENES, ids=str)
def scene(request):
    return Scene(seed=21, **SCENES[request.param])


def skip_window(scene, base):
    window = base.window if isinstance(base, SnapKV) else 0
    return lambda b, g, p: p >= scene.lengths[b] - window


def base_score(scene, base):
    """The base's score by KV head before any pooling, as lists (``test_scorers`` holds it to its formula)."""
    score = base.reduce(scene.seen, base.raw(scene.seen))
    return {(b, g): [float(x) for x in score[b, g, : len(scene.held[b][g])]] for b, g in scene.places()}


def pooled_prefix(scene, base, scores):
    """Pool the lists as the base does, on the tokens before its window; 0 on the window."""
    if not isinstance(base, SnapKV):
        return scores
    result = {}
    for (b, g), values in scores.items():
        before = [i for i, p in enumerate(scene.held[b][g]) if p < scene.lengths[b] - base.window]
        result[b, g] = pool([values[i] for i in before], base.kernel, base.pooling)
        result[b, g] += [0.0] * (len(values) - len(before))
    return result


# ---- VATP


@pytest.mark.parametrize("base", ROW_BASES, ids=str)
@pytest.mark.parametrize("norm", [1, 2, "inf"])
def test_vatp_multiplies_before_pooling(scene, norm, base):
    inner = ROW_BASES[base]
    scores = base_score(scene, inner)
    for (b, g), values in scores.items():
        for slot, value in enumerate(scene.values(b, g)):
            sizes = [abs(float(x)) for x in value]
            size = {1: sum(sizes), 2: math.sqrt(sum(x * x for x in sizes)), "inf": max(sizes)}[norm]
            values[slot] *= size
    agree(
        scene, Vatp(inner=inner, norm=norm).score, pooled_prefix(scene, inner, scores), skip=skip_window(scene, inner)
    )


def test_vatp_defaults():
    assert (Vatp(inner=H2O()).norm, Vatp(inner=H2O()).sinks) == (1, 20)


# ---- OBCache


def in_float64(queries=5, keys=7, group=2, dim=6, seed=0):
    """Draw q, k, v of one KV head."""
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(group, queries, dim, generator=make, dtype=torch.float64)
    return q, *(torch.randn(keys, dim, generator=make, dtype=torch.float64) for _ in range(2))


def visible(q, k):
    """``[queries, keys]`` bool: the queries are the last tokens."""
    return torch.arange(len(k)) <= torch.arange(q.shape[1])[:, None] + len(k) - q.shape[1]


def rows_of(q, k, v):
    """Rows of one KV head as OBCache sees them."""
    logits = (q @ k.T).masked_fill(~visible(q, k), -torch.inf)
    return AttentionRows(logits[None], lambda: Values.of(v[None, None]), torch.ones(1, q.shape[1], dtype=torch.bool))


def closed_form(part):
    """What OBCache sums, ``[G, keys]``, of q, k, v."""
    return lambda *made: rows_of(*made).total(CLOSED[part])[0]


def bound_of(function, made):
    """Bound what is computed from q, k, v in float64."""
    return conditioned(function, *made, dtype=torch.float64)


def shrunk_outputs(q, k, v, p, by_value, by_key):
    """Outputs ``[G, queries, D]`` with one pair scaled by ``1 - by_value`` and ``1 - by_key``."""
    chosen = (torch.arange(len(k)) == p).double()[:, None]
    logits = q @ (k * (1 - chosen * by_key)).T
    return logits.masked_fill(~visible(q, k), -torch.inf).softmax(-1) @ (v * (1 - chosen * by_value))


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_closed_forms_are_the_first_order_change(part):
    """``sum_i ||d o_i||^2`` with ``d o_i = -A [v + s (v - o_i)]``, and the derivative that autograd finds."""
    made = q, k, v = in_float64()
    rows, closed = rows_of(*made), closed_form(part)(*made)
    bound = 2 * bound_of(closed_form(part), made)  # of two that round apart
    share_v, share_k = PARTS[part]
    for p in range(len(k)):
        slope = torch.autograd.functional.jacobian(
            lambda step, p=p: shrunk_outputs(*made, p, share_v * step, share_k * step),
            torch.zeros((), dtype=torch.float64),
        )
        for h in range(2):
            defined = 0.0
            for i in range(5):
                a, s, o = rows.a[0, h, i, p], rows.s[0, h, i, p], rows.o[0, h, i]
                change = -a * (share_v * v[p] + share_k * s * (v[p] - o))
                defined += float(change @ change)
            hold(closed[h, p], defined, bound[h, p])
            hold(closed[h, p], slope[h].square().sum(), bound[h, p])


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_finite_differences_approach_the_closed_form(part):
    """Scaling a pair by (1 - eps): the squared change over eps^2 tends to the closed form, linearly in eps."""
    made = in_float64(seed=3)
    closed = closed_form(part)(*made).sum(0)
    share_v, share_k = PARTS[part]

    def whole(*made):
        return shrunk_outputs(*made, 0, 0.0, 0.0)

    rounded = 2 * bound_of(whole, made)  # of a difference of outputs
    worst = []
    for eps in (1e-2, 1e-3, 1e-4):
        ratios = []
        for p in range(len(closed)):
            change = shrunk_outputs(*made, p, share_v * eps, share_k * eps) - whole(*made)
            ratios.append(float(change.square().sum() / eps**2 / closed[p]))
            if part == "value":  # exact for a step of any size, but for the rounding of the difference
                hold(ratios[-1], 1.0, float(2 * (change.abs() * rounded).sum() / eps**2 / closed[p]))
        worst.append(max(abs(ratio - 1) for ratio in ratios))
    if part != "value":  # of the second order in eps is a share of eps itself
        assert worst[0] < 0.1
        assert worst[0] / worst[1] == pytest.approx(10, rel=0.1)
        assert worst[1] / worst[2] == pytest.approx(10, rel=0.1)


def test_the_cross_term_counts_twice():
    made = in_float64(seed=4)

    def cross(q, k, v):
        rows = rows_of(q, k, v)
        return (rows.a.square() * rows.s * (v.square().sum(-1) - rows.o @ v.T)).sum(2)[0]

    functions = {name: closed_form(name) for name in CLOSED} | {"cross": lambda *made: 2 * cross(*made)}
    parts = {name: function(*made) for name, function in functions.items()}
    bound = sum(bound_of(function, made) for function in functions.values())
    hold(parts["joint"], parts["value"] + parts["key"] + parts["cross"], bound)
    assert float(parts["joint"].min()) >= 0


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("base", ROW_BASES, ids=str)
def test_obcache_sums_the_error_over_the_queries_of_its_base_and_the_group(scene, base, part):
    inner, (share_v, share_k) = ROW_BASES[base], PARTS[part]
    queries = {"h2o": None, "h2o-window": 3, "scissorhands": 4, "tova": 1, "tova-head": 1}.get(base, 0)
    last = inner.window if queries == 0 else queries
    scores = {}
    for b, g in scene.places():
        values, total = scene.values(b, g), [0.0] * len(scene.held[b][g])
        for h in scene.query_heads(g):
            a, s, _ = scene.dense(b, h)
            outputs = a @ values
            for i in range(0 if last is None else max(0, len(a) - last), len(a)):
                for p, value in enumerate(values):
                    change = a[i, p] * (share_v * value + share_k * s[i, p] * (value - outputs[i]))
                    total[p] += float(change @ change)
        scores[b, g] = total
    agree(scene, OBCACHE[part](inner=inner).score, pooled_prefix(scene, inner, scores), skip=skip_window(scene, inner))


def test_the_group_sum_is_the_error_of_the_concatenated_output():
    scene = Scene(seed=2, lengths=(8,), heads=6)
    scorer = OBCacheValue(inner=H2O())
    got, bound = scorer.score(scene.seen), scene.bound(scorer.score)
    for g in range(2):
        for p in range(8):
            error = 0.0
            for i in range(8):
                outputs = [float(scene.dense(0, h)[0][i, p]) * scene.values(0, g)[p] for h in scene.query_heads(g)]
                error += float(torch.cat(outputs).square().sum())
            hold(got[0, g, p], error, bound[0, g, p])


def test_the_key_error_over_caote_is_a_function_of_the_pair():
    """One query: ``E_key / CAOTE^2 = s^2 (1 - A)^2``."""
    made = in_float64(queries=1, group=1)

    def from_caote(*made):
        rows = rows_of(*made)
        a, s = rows.a[0, 0, 0], rows.s[0, 0, 0]
        return (s * (1 - a) * removal_error(a, rows.values.v[0, 0])).square()

    bound = bound_of(from_caote, made) + bound_of(closed_form("key"), made)[0]
    hold(closed_form("key")(*made)[0], from_caote(*made), bound)


def test_half_precision_does_not_underflow():
    """A uniform weight of 1/600, squared, is 0 in float16."""
    scene = Scene(lengths=(600,), dtype=torch.float16, sharp=0.0, heads=1, kv_heads=1)
    scorer = OBCacheValue(inner=Tova(recent=0))
    wanted = scene.v[0, 0].square().sum(-1) / 600**2
    hold(scorer.score(scene.seen)[0, 0], wanted, scene.bound(scorer.score)[0, 0])


# ---- CAOTE


def without(weights, values, j):
    """The output when token j is gone and the rest is normalised anew."""
    rest = [p for p in range(len(values)) if p != j]
    size = sum(float(weights[p]) for p in rest)
    return sum((float(weights[p]) / size * values[p] for p in rest), torch.zeros_like(values[0]))


def test_caote_on_tova_is_the_change_of_the_output_on_removal(scene):
    """Of the group's concatenated outputs, for the newest query: remove the key, attend again."""
    expected = {}
    for b, g in scene.places():
        values, held = scene.values(b, g), len(scene.held[b][g])
        expected[b, g] = []
        for p in range(held):
            change = 0.0
            for h in scene.query_heads(g):
                logits = scene.dense(b, h)[1][-1]
                others = torch.cat([logits[:p], logits[p + 1 :]])
                left = torch.cat([values[:p], values[p + 1 :]])
                now = others.softmax(0) @ left if held > 1 else torch.zeros_like(values[0])
                change += float((logits.softmax(0) @ values - now).square().sum())
            expected[b, g].append(math.sqrt(change))
    agree(scene, Caote(inner=Tova(scope="kv_head")).score, expected)


@pytest.mark.parametrize("base", ROW_BASES, ids=str)
def test_caote_on_any_base_is_the_change_of_the_pseudo_output(scene, base):
    inner, expected = ROW_BASES[base], {}
    heads = inner.heads(scene.seen).double()
    for b, g in scene.places():
        values, held = scene.values(b, g), len(scene.held[b][g])
        total = [0.0] * held
        for h in scene.query_heads(g):
            weights = heads[b, h, :held] / heads[b, h, :held].sum()
            for j in range(held):
                if held > 1:
                    total[j] += float((weights @ values - without(weights, values, j)).square().sum())
                else:
                    total[j] += float(values[0].square().sum())
        expected[b, g] = [math.sqrt(x) for x in total]
    agree(scene, Caote(inner=inner).score, expected)


def removal(weights, values):
    """``h_j / (1 - h_j) ||sum_p h_p (v_p - v_j)||``, pair by pair; ``1 - h_j`` is the sum of the others."""
    others = (weights * (1 - torch.eye(len(weights), dtype=torch.float64))).sum(-1)
    moved = (weights[:, None] * (values - values[:, None])).sum(1)
    return weights / others * moved.norm(dim=-1) / weights.sum()


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-7, 1e-9, 1e-12, 1e-20, 1e-35])
def test_weights_near_one(gap):
    """float32 weights, of which the largest rounds to 1."""
    make = torch.Generator().manual_seed(1)
    values = torch.randn(6, 4, generator=make, dtype=torch.float64)
    for top in range(6):
        weights = torch.rand(6, generator=make, dtype=torch.float64)
        weights[top] = 0.0
        weights *= gap / weights.sum()
        weights[top] = 1 - gap
        exact = removal(*(bounded(x, torch.float64) for x in (weights, values)))[top]
        hold((weights @ values - without(weights, values, top)).norm(), exact)
        # the others move the output by their weight, which a denominator clamped at 1e-6 must not shrink
        got = removal_error(weights.float(), values.float())
        hold(got, removal(bounded(weights.float()), bounded(values.float())))
        assert got.argmax() == top


def test_a_weight_of_exactly_one():
    values = torch.tensor([[3.0, 4.0], [1.0, 1.0], [2.0, 0.0]])
    got = removal_error(torch.tensor([1.0, 0.0, 0.0]), values)
    assert got.tolist() == [5.0, 0.0, 0.0]


def test_a_dominant_token_ranks_first():
    """Log-odds from 2 to 60: the token that holds nearly all the attention is the last to go."""
    make = torch.Generator().manual_seed(7)
    for odds in range(2, 61):
        logits = torch.rand(9, generator=make)
        logits[4] += odds
        values = torch.randn(9, 8, generator=make)
        got = removal_error(logits.softmax(0), values)
        assert bool(got.isfinite().all())
        hold(got, removal(bounded(logits).softmax(0), bounded(values)))
        assert odds < 8 or got.argmax() == 4


@pytest.mark.parametrize("base", [Tova(scope="kv_head"), H2O(recent=2), SnapKV(window=3, kernel=3)])
def test_fastcaote_measures_from_the_mean_of_the_held_values(scene, base):
    heads, expected = base.heads(scene.seen).double(), {}
    for b, g in scene.places():
        values, held = scene.values(b, g), len(scene.held[b][g])
        mean = sum(values) / held
        expected[b, g] = []
        for j in range(held):
            total = 0.0
            for h in scene.query_heads(g):
                weight = float(heads[b, h, j] / heads[b, h, :held].sum())
                total += (weight / max(1 - weight, 1e-6) * float((mean - values[j]).norm())) ** 2
            expected[b, g].append(math.sqrt(total))
    agree(scene, FastCaote(inner=base).score, expected, skip=lambda b, g, p: scene.lengths[b] < 2)


@pytest.mark.parametrize("base", [KNorm(), Gates()], ids=["knorm", "gates"])
def test_caote_on_a_score_without_rows_shifts_it_to_zero(base):
    scene = Scene(seed=5, lengths=(9, 5), gate=True)
    plain, expected = base.score(scene.seen).double(), {}
    for b, g in scene.places():
        values, held = scene.values(b, g), len(scene.held[b][g])
        shifted = plain[b, g, :held] - plain[b, g, :held].min()
        weights = shifted / shifted.sum()
        change = [(weights @ values - without(weights, values, j)).norm() for j in range(held)]
        expected[b, g] = [math.sqrt(2) * float(x) for x in change]  # both query heads of the group
    agree(scene, Caote(inner=base).score, expected)


# ---- criticalkv


def sizes(scene, b, g):
    """Mean over the group of the sum of absolute entries that each value writes, a list."""
    heads = [scene.values(b, g) @ scene.output[h].double() for h in scene.query_heads(g)]
    return group_mean([x.abs().sum(-1).tolist() for x in heads])


@pytest.mark.parametrize("base", [H2O(), SnapKV(window=3, kernel=3), KNorm(), Gates()], ids=lambda x: type(x).__name__)
def test_criticalkv_is_the_base_score_and_its_product(scene, base):
    scene.gate = torch.rand(scene.seen.key_valid.shape, generator=torch.Generator().manual_seed(1))
    seen, scorer = scene.seen, CriticalKV(inner=base)
    plain, product = base.score(scene.seen), {}
    for b, g in scene.places():
        mine = plain[b, g, : len(scene.held[b][g])].tolist()
        lowest = min(0.0, *mine, 0.0)  # the product alone is of a score that is shifted
        product[b, g] = [(s - lowest + 1e-4) * u for s, u in zip(mine, sizes(scene, b, g), strict=True)]
    score = scorer.score(seen)
    second, share = scorer.second(seen, score)
    assert torch.equal(score[seen.key_valid], plain[seen.key_valid])
    agree(scene, lambda seen: scorer.second(seen, scorer.score(seen))[0], product)
    assert share == 0.5
    again, _ = scorer.second(seen, score)  # remembered
    assert torch.equal(again, second)


def two_stages(score, product, protected, count, first):
    """The protected and the best of ``score`` up to a share of the count, then the best of the product; sorted."""
    kept = [p for p, safe in enumerate(protected) if safe]
    for values, limit in ((score, int(first * count)), (product, count)):
        rest = sorted((p for p in range(len(score)) if p not in kept), key=lambda p, v=values: (-v[p], p))
        kept += rest[: max(0, limit - len(kept))]
    return sorted(kept)


def two_score_ballot(seed=0, heads=3, n=20, capacity=9):
    make = torch.Generator().manual_seed(seed)
    score, second = torch.rand(2, 1, heads, n, generator=make)
    protected = torch.zeros(1, heads, n, dtype=torch.bool)
    protected[..., -2:] = True
    numbers = torch.tensor([capacity]), torch.tensor([n]), torch.tensor([True])
    return Ballot(score, protected, torch.ones_like(protected), *numbers, second=second, first_share=0.5)


@pytest.mark.parametrize("first", [0.0, 0.3, 0.5, 1.0])
def test_the_second_score_fills_what_the_first_leaves(first):
    ballot = replace(two_score_ballot(), first_share=first)
    keep = ballot.keep(torch.tensor([9]))
    for h in range(3):
        parts = ballot.score[0, h].tolist(), ballot.second[0, h].tolist(), ballot.protected[0, h].tolist()
        assert keep[0, h].nonzero().flatten().tolist() == two_stages(*parts, 9, first)
    if first == 1:
        assert torch.equal(keep, replace(ballot, second=None).keep(torch.tensor([9])))


def test_a_constant_size_is_the_base_selection():
    ballot = two_score_ballot()
    ballot.second = ballot.score * 3
    assert torch.equal(ballot.keep(torch.tensor([9])), replace(ballot, second=None).keep(torch.tensor([9])))


def test_less_and_less_of_two_scores_is_one_decision():
    """What a smaller share keeps is among what a larger one keeps, also when the ballot was cut in between."""
    for seed in range(30):
        ballot = two_score_ballot(seed, n=30)
        columns, left = torch.arange(30).expand(1, 3, 30), ballot
        for share in (25, 17, 16, 9, 5, 3):
            keep = left.keep(torch.tensor([share]))
            order = [columns[0, h][keep[0, h]] for h in range(3)]
            columns, left = torch.stack(order)[None], left.after(keep)
            whole = ballot.keep(torch.tensor([share]))
            assert [x.tolist() for x in order] == [whole[0, h].nonzero().flatten().tolist() for h in range(3)]


def test_heads_share_by_the_first_score_alone():
    ballot = two_score_ballot(capacity=9)
    keep = Heads(floor=0.2).keep_later(0, ballot, None)
    plain = Heads(floor=0.2).keep_later(0, replace(ballot, second=None), None)
    assert keep.sum(-1).tolist() == plain.sum(-1).tolist()
    assert int(keep.sum()) == 27 and not torch.equal(keep, plain)
    for h, count in enumerate(keep[0].sum(-1).tolist()):
        parts = ballot.score[0, h].tolist(), ballot.second[0, h].tolist(), ballot.protected[0, h].tolist()
        assert keep[0, h].nonzero().flatten().tolist() == two_stages(*parts, count, 0.5)


# ---- all wrappers


COMBINATIONS = [
    pytest.param(WRAPPERS[wrapper](inner=inner), id=f"{base}+{wrapper}")
    for wrapper in WRAPPERS
    for base, inner in (ROW_BASES | {"knorm": KNorm(), "gates": Gates(recent=2)}).items()
    if WRAPPERS[wrapper].__dataclass_fields__["inner"].type != "RowScorer" or base in ROW_BASES
]


@pytest.mark.parametrize("scorer", COMBINATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scores_are_finite_with_masked_pairs_and_huge_logits(scorer, dtype):
    scene = Scene(seed=8, lengths=(14, 1, 6), ragged=True, dtype=dtype, sharp=300.0, gate=True)
    seen = scene.seen
    score = scorer.score(seen)
    second, _ = scorer.second(seen, score) or (score, 1.0)
    for values in (score, second):
        assert values.dtype == torch.float32
        assert values.shape == seen.key_valid.shape
        assert bool(values[seen.key_valid].isfinite().all())
    assert float(second[seen.key_valid].min()) >= 0  # a first score beside it may be of any sign


@pytest.mark.parametrize("scorer", COMBINATIONS)
def test_free_slots_change_nothing(scorer):
    clean, dirty = (Scene(seed=8, lengths=(14, 6), ragged=True) for _ in range(2))
    valid = clean.seen.key_valid
    dirty._parts[1][~valid], dirty._parts[2][~valid] = 1e30, float("nan")
    assert torch.equal(scorer.score(clean.seen)[valid], scorer.score(dirty.seen)[valid])


@pytest.mark.parametrize("scorer", COMBINATIONS)
def test_wrappers_keep_the_protection_of_their_base(scorer):
    scene = Scene(seed=8, lengths=(14, 3), ragged=True)
    seen, capacity = scene.seen, torch.tensor([7, 3])
    extra = replace(scorer, sinks=2, recent=4).protected(seen, capacity)
    inner, own = scorer.inner.protected(seen, capacity), scorer.protected(seen, capacity)
    first, age = seen.key_ranks < scorer.sinks, seen.age
    newest = age < (1 if isinstance(scorer, Caote) else 0)
    assert torch.equal(own, inner | first | newest)
    assert torch.equal(extra, inner | (seen.key_ranks < 2) | (age < 4))
    if isinstance(scorer, Caote):
        for b, g in scene.places():
            assert own[b, g, scene.held[b][g].index(scene.lengths[b] - 1)]


@pytest.mark.parametrize("scorer", COMBINATIONS)
def test_wrappers_see_the_queries_that_their_base_needs(scorer):
    assert scorer.needs.every_query == scorer.inner.needs.every_query
    assert scorer.needs.lookback == scorer.inner.needs.lookback


def test_tova_in_layer_scope_under_vatp_is_the_layer_mean_times_the_norm():
    """Section 13, point 5."""
    scene = Scene(seed=3, lengths=(9,))
    paid = group_mean([[float(x) for x in scene.dense(0, h)[0][-1]] for h in range(4)])
    expected = {
        (0, g): [a * float(v.abs().sum()) for a, v in zip(paid, scene.values(0, g), strict=True)] for g in range(2)
    }
    agree(scene, Vatp(inner=Tova()).score, expected)


@needs_compiler
@pytest.mark.parametrize(
    "spec", ["h2o", "h2o+obcache_value", "h2o+obcache_key", "h2o+obcache_joint", "snapkv+obcache_joint"]
)
def test_a_prompt_is_scored_in_one_pass_as_in_several(tiny_llama, spec, monkeypatch):
    """Scores of every layer, with the outputs of the model's own attention and a padded row."""
    model, scores = tiny_llama(), {"cpp": [], "reference": []}
    make = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(3, 128, (2, 150), generator=make), torch.ones(2, 150).long()
    mask[1, :31] = 0
    scorer = ag.policy(spec, budget=40).scorer
    plain, bounds = type(scorer).score, []

    def of_operands(self, seen):
        """The score as a function of queries, keys and values."""

        def score(q, k, v):
            keys, queries = replace(seen._keys, k=k, v=v), replace(seen._queries, q=q, outputs=None)
            context = Context(scaling=seen.scaling, layer=seen.layer, precise=seen._precise)
            return plain(self, Observation(keys=keys, queries=queries, context=context))

        return score

    def score(self, seen):
        """Score what the layer holds by each version: what is compared must not depend on the layers before."""
        unrecorded = copy(seen)
        unrecorded.recorded = None
        for version, found in scores.items():
            monkeypatch.setenv("AG_KERNELS", version)
            seen._memo.clear()
            found.append(plain(self, unrecorded))
        bounds.append(conditioned(of_operands(self, seen), seen.q, seen.k, seen._keys.v))
        monkeypatch.delenv("AG_KERNELS")
        return found[-1]

    monkeypatch.setattr(type(scorer), "score", score)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=ag.EvictionCache(model, spec, budget=40))
    assert len(scores["cpp"]) == len(scores["reference"]) == 3
    for one, several, bound in zip(scores["cpp"], scores["reference"], bounds, strict=True):
        hold(one, several, 2 * bound)  # of two that round apart
