"""The options of scorers, wrappers and allocators against plain lists in float64; each changes what is kept."""

import math
from itertools import pairwise
from statistics import fmean

import pytest
import torch

import ag
from ag.engine.allocators.preference import official_shares
from ag.engine.allocators.pyramid import pyramid
from ag.engine.decide import Decision
from ag.engine.scorers.cake import Cake
from ag.engine.scorers.h2o import H2O
from ag.engine.scorers.scissorhands import Scissorhands
from ag.engine.scorers.snapkv import SnapKV
from ag.engine.scorers.tova import Tova
from ag.engine.wrappers.caote import Caote, FastCaote
from ag.engine.wrappers.obcache import OBCacheJoint, OBCacheKey, OBCacheValue
from ag.engine.wrappers.vatp import Vatp
from ag.errors import BudgetWarning, UserError
from tests.support import slow_policies, windowed
from tests.support.attention_by_hand import Scene, agree, pool
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.held import check, feed, observed_calls, run, seen_by
from tests.support.pairs import covering
from tests.support.refused import refuses

SCENES = {
    "one": {"lengths": (10,)},
    "group3-left": {"lengths": (11, 5), "heads": 6},
    "right": {"lengths": (4, 12), "padding": "right"},
    "ragged": {"lengths": (15, 6), "ragged": True},
}
REDUCE = {"mean": fmean, "sum": sum, "max": max}
SNAP = {"window": 4, "kernel": 3}
#: name: (scorer, options, those without the effect)
CHANGES = {
    "h2o-max": ("h2o", {"group": "max"}, {}),
    "h2o-count": ("h2o", {"normalize": "count"}, {}),
    "h2o-count-window": ("h2o", {"normalize": "count", "window": 9, "recent": 2}, {"window": 9, "recent": 2}),
    "scissorhands-max": ("scissorhands", {"window": 9, "recent": 3, "group": "max"}, {"window": 9, "recent": 3}),
    "vatp-code": ("scissorhands", {"window": 9, "recent": 3, "vatp_code": True}, {"window": 9, "recent": 3}),
    "tova-max": ("tova", {"scope": "kv_head", "group": "max"}, {"scope": "kv_head"}),
    "snapkv-max": ("snapkv", SNAP | {"group": "max"}, SNAP),
    "snapkv-pool": ("snapkv", SNAP | {"kernel": 7, "pool_then_reduce": True}, SNAP | {"kernel": 7}),
    "cake-max": ("cake", SNAP | {"kernel": 5, "group": "max"}, SNAP | {"kernel": 5}),
    "cake-order": ("cake", SNAP | {"kernel": 5, "official_order": True}, SNAP | {"kernel": 5}),
}
#: these differ from the default only once tokens are evicted while decoding
LATER = ("vatp-code", "cake-order")


@pytest.fixture(params=SCENES, ids=str)
def scene(request):
    return Scene(seed=33, **SCENES[request.param])


def decide(policy, scene):
    return Decision(policy, [0]).decide(scene.seen)[0]


def by_group(scene, of_head, how):
    """Combine the lists ``of_head(b, h)`` over each group."""
    return {
        (b, g): [REDUCE[how](x) for x in zip(*(of_head(b, h) for h in scene.query_heads(g)), strict=True)]
        for b, g in scene.places()
    }


def prefix_pooled(scene, scores, window, kernel, kind):
    """Pool the tokens before the window; 0 on the window."""
    result = {}
    for (b, g), values in scores.items():
        before = sum(p < scene.lengths[b] - window for p in scene.held[b][g])
        result[b, g] = pool(values[:before], kernel, kind) + [0.0] * (len(values) - before)
    return result


# ---- scorers, whole policies


@pytest.mark.parametrize(
    ("family", "name", "schedule"),
    [
        *(("tiny_llama", name, "blocks:5+steps:3") for name in CHANGES),
        *(("tiny_llama", name, "every") for name in ("h2o-count", "h2o-count-window", *LATER)),
        *(("tiny_llama", name, "blocks:7") for name in ("h2o-max", "snapkv-pool", *LATER)),
        ("tiny_mistral", "h2o-count", "blocks:5+steps:3"),
        ("tiny_mistral", "cake-order", "every"),
    ],
)
def test_what_is_held_is_what_the_policy_with_the_option_says(family, name, schedule, request, monkeypatch):
    windows = {"sliding_window": 24} if family == "tiny_mistral" else {}
    model, prompt, passes = request.getfixturevalue(family)(**windows), 27, [1, 1, 3, 1, 1, 1, 2]
    spec, options, plain = CHANGES[name]
    row = torch.randint(3, 128, (prompt + sum(passes),), generator=torch.Generator().manual_seed(5))
    calls, capacity = observed_calls(monkeypatch), 15
    policy = ag.policy(f"{spec}@uniform", budget=capacity, schedule=schedule, **options)
    result = run(model, policy, [row], [prompt], steps=passes)
    monkeypatch.undo()
    for layer, seen in calls.items():
        q, k, first = seen_by(seen, "q", 0), seen_by(seen, "k", 0), seen[0][0]
        slow = windowed.Layer(spec, q, k, first.scaling, capacity, options, first.window)
        wanted = slow_policies.follow(slow, prompt, passes, policy.block, policy.steps)
        assert [held[layer][0] for held in result.held] == wanted
    default = run(model, ag.policy(f"{spec}@uniform", capacity, schedule, **plain), [row], [prompt], steps=passes)
    if name not in LATER or "every" in schedule or "steps" in schedule:
        assert result.held != default.held
    else:
        assert result.held == default.held


@pytest.mark.parametrize(
    ("name", "schedule", "side"),
    covering(
        name=["h2o-count", "h2o-count-window", "vatp-code", "snapkv-pool", "cake-order"],
        schedule=["blocks:7+every", "steps:3"],
        side=["left", "right"],
    ),
)
def test_a_padded_batch_holds_what_its_rows_hold_alone(tiny_llama, name, schedule, side):
    """Rows of very different length: the short one's prompt is over while the other is still read in blocks."""
    model, prompts = tiny_llama(), (37, 16)
    rows = [torch.randint(3, 128, (p + 4,), generator=torch.Generator().manual_seed(p)) for p in prompts]
    spec, options, _ = CHANGES[name]
    policy = ag.policy(f"{spec}@uniform", budget=11, schedule=schedule, **options)
    alone = [run(model, policy, [row], [p]) for row, p in zip(rows, prompts, strict=True)]
    batch = run(model, policy, rows, prompts, side)
    for b, single in enumerate(alone):
        assert [[layer[b] for layer in held] for held in batch.held] == [
            [layer[0] for layer in held] for held in single.held
        ]


@pytest.mark.parametrize("how", REDUCE)
@pytest.mark.parametrize(
    "base",
    [H2O(), Scissorhands(window=4), Tova(scope="kv_head"), SnapKV(**SNAP), Cake(window=4)],
    ids=lambda x: type(x).__name__,
)
def test_groups_combine_by_mean_sum_or_max(scene, base, how):
    last = {"H2O": None, "Tova": 1}.get(type(base).__name__, 4)

    def of_head(b, h):
        if not isinstance(base, Cake):
            return scene.column_sums(b, h, last)
        rows = scene.dense(b, h)[0][-4:]
        return (rows.mean(0) + 200 * rows.var(0)).tolist()

    expected = by_group(scene, of_head, how)
    window = getattr(base, "kernel", 0) and base.window
    if window:
        expected = prefix_pooled(scene, expected, 4, base.kernel, base.pooling)
    if scene.lengths[0] < 4 and isinstance(base, Cake):
        pytest.skip("variance of fewer queries than the window")
    score = type(base)(**{**vars(base), "group": how}).score
    agree(scene, score, expected, skip=lambda b, g, p: p >= scene.lengths[b] - window)


def test_tova_in_layer_scope_takes_the_mean_alone():
    for how in ("sum", "max"):
        with pytest.raises(UserError, match=f"Tova: group='{how}': .*mean.*scope=kv_head"):
            ag.policy("tova", 8, group=how)


@pytest.mark.parametrize("window", [None, 4, 50])
def test_h2o_divided_by_the_queries_that_saw_the_key(window):
    scene = Scene(seed=3, lengths=(12, 5), ragged=True)

    def of_head(b, h):
        visible = scene.dense(b, h)[2][-(window or 99) :].sum(0).tolist()
        return [x / n for x, n in zip(scene.column_sums(b, h, window), visible, strict=True)]

    agree(scene, H2O(window=window, normalize="count").score, by_group(scene, of_head, "mean"))


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_pooling_before_the_group_matters_for_max_alone(scene, kind):
    options = {"window": 3, "kernel": 5, "pooling": kind}

    def of_head(b, h):
        before = sum(p < scene.lengths[b] - 3 for p in scene.held[b][h // scene.group])
        values = scene.column_sums(b, h, 3)
        return pool(values[:before], 5, kind) + [0.0] * (len(values) - before)

    expected = by_group(scene, of_head, "mean")
    score = SnapKV(**options, pool_then_reduce=True).score
    agree(scene, score, expected, skip=lambda b, g, p: p >= scene.lengths[b] - 3)
    assert scene.alike(score, SnapKV(**options).score) == (kind == "avg")


def test_the_order_of_the_code_is_of_cake_alone():
    with pytest.raises(UserError, match="Cake: official_order=True: .*pool_then_reduce"):
        ag.policy("cake", 64, official_order=True, pool_then_reduce=True)
    with pytest.raises(UserError, match="official_order .*caote"):
        ag.policy("cake+caote", 64, official_order=True)


# ---- wrappers


@pytest.mark.parametrize("spec", ["obcache_value", "obcache_key", "obcache_joint"])
def test_wrappers_take_the_options_they_inherit(spec):
    made = ag.policy(f"snapkv+{spec}", 64, group="pre", obc_window=16, window=8).scorer
    assert (made.group, made.obc_window, made.inner) == ("pre", 16, SnapKV(window=8))
    assert made.needs.lookback == 15
    fast = ag.policy("h2o+fastcaote", 64, greedy=True, pool_stage="final").scorer
    assert fast == FastCaote(inner=H2O(), greedy=True, pool_stage="final")


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_vatp_after_pooling(scene, pooling):
    base = SnapKV(window=3, kernel=5, pooling=pooling)
    expected = prefix_pooled(scene, by_group(scene, lambda b, h: scene.column_sums(b, h, 3), "mean"), 3, 5, pooling)
    for (b, g), values in expected.items():
        expected[b, g] = [x * float(v.abs().sum()) for x, v in zip(values, scene.values(b, g), strict=True)]
    score = Vatp(inner=base, stage="after").score
    agree(scene, score, expected, skip=lambda b, g, p: p >= scene.lengths[b] - 3)
    assert not scene.alike(score, Vatp(inner=base).score)
    same = [Vatp(inner=H2O(), stage=stage).score(scene.seen) for stage in ("before", "after")]
    assert torch.equal(*same)  # without pooling there is one order


def shares(scene, b, h, held, base_sums):
    """Weights of the held slots, normalised, from ``base_sums(b, h)``, a list."""
    values = base_sums(b, h)
    total = sum(values[i] for i in held)
    return {i: values[i] / total for i in held}


def changes(scene, b, g, held, base_sums, fast):
    """By slot, the change of the group's output when that slot alone goes."""
    values, result = scene.values(b, g), {}
    mean = sum(values[i] for i in held) / len(held)
    for i in held:
        total = 0.0
        for h in scene.query_heads(g):
            weight = shares(scene, b, h, held, base_sums)
            if fast:
                total += (weight[i] / max(1 - weight[i], 1e-6) * float((mean - values[i]).norm())) ** 2
                continue
            whole = sum(weight[j] * values[j] for j in held)
            rest = sum(weight[j] for j in held if j != i)
            without = sum(weight[j] / rest * values[j] for j in held if j != i)
            total += float((whole - without).square().sum())
        result[i] = math.sqrt(total)
    return result


@pytest.mark.parametrize("fast", [False, True], ids=["caote", "fastcaote"])
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_caote_pooled_at_the_end(scene, kind, fast):
    base = SnapKV(window=3, kernel=3, pooling=kind)
    expected = {}
    for b, g in scene.places():
        held = list(range(len(scene.held[b][g])))
        found = changes(scene, b, g, held, lambda b, h: scene.column_sums(b, h, 3), fast)
        expected[b, g] = pool([found[i] for i in held], 3, kind)
    wrapper = FastCaote if fast else Caote
    score = wrapper(inner=base, pool_stage="final").score
    agree(scene, score, expected)
    assert not scene.alike(score, wrapper(inner=base).score)


@pytest.mark.parametrize("spec", ["caote", "fastcaote"])
@pytest.mark.parametrize("base", ["h2o", "tova"])
def test_greedy_caote_lets_tokens_go_one_by_one(base, spec):
    """Against removing them in float64; what is kept differs from letting all go at once."""
    options, last = ({"recent": 2}, None) if base == "h2o" else ({"recent": 1}, 1)
    differ = 0
    for seed in range(2):
        scene = Scene(seed=seed, lengths=(12, 8), heads=6, ragged=seed % 2 == 1, sharp=2.0)
        budget, wanted = 5, {}
        for b, g in scene.places():
            left = list(range(len(scene.held[b][g])))
            safe = {i for i in left if scene.held[b][g][i] >= scene.lengths[b] - options["recent"]}
            while len(left) > budget:
                found = changes(scene, b, g, left, lambda b, h, s=scene: s.column_sums(b, h, last), spec == "fastcaote")
                left.remove(min((i for i in left if i not in safe), key=lambda i: (found[i], i)))
            wanted[b, g] = left
        keep = decide(ag.policy(f"{base}+{spec}", budget, greedy=True, **options), scene)
        once = decide(ag.policy(f"{base}+{spec}", budget, **options), scene)
        for b, g in scene.places():
            assert keep[b, g].nonzero().flatten().tolist() == wanted[b, g]
            assert int(once[b, g].sum()) == len(wanted[b, g])
        differ += not torch.equal(keep, once)
    assert differ


@pytest.mark.parametrize("schedule", ["prefill", "blocks:7+every"])
@pytest.mark.parametrize("allocator", ["heads", "pyramid"])
def test_greedy_caote_runs_under_every_allocator(tiny_llama, allocator, schedule):
    """Those that keep another number than the mean go on in the order of the removals."""
    row = torch.randint(3, 128, (34,), generator=torch.Generator().manual_seed(1))
    result = run(tiny_llama(), ag.policy(f"tova+caote@{allocator}", 9, schedule, greedy=True), [row], [29])
    assert sum(len(head) for layer in result.held[0] for head in layer[0]) == 3 * 2 * 9
    check(tiny_llama(), [row], result)


@pytest.mark.parametrize("part", ["value", "key", "joint"])
@pytest.mark.parametrize("how", ["mean", "max", "pre"])
def test_obcache_combines_the_group(scene, how, part):
    by_value, by_key = {"value": (1, 0), "key": (0, 1), "joint": (1, 1)}[part]

    def error(b, g, a, s, o):
        return [
            sum(float((a[i, p] * (by_value * v + by_key * s[i, p] * (v - o[i]))).square().sum()) for i in range(len(a)))
            for p, v in enumerate(scene.values(b, g))
        ]

    expected = {}
    for b, g in scene.places():
        rows = [scene.dense(b, h)[:2] for h in scene.query_heads(g)]
        rows = [(a[-3:], s[-3:], a[-3:] @ scene.values(b, g)) for a, s in rows]
        if how == "pre":
            expected[b, g] = error(b, g, *(sum(x) / len(x) for x in zip(*rows, strict=True)))
        else:
            expected[b, g] = [REDUCE[how](x) for x in zip(*(error(b, g, *row) for row in rows), strict=True)]
    wrapper = {"value": OBCacheValue, "key": OBCacheKey, "joint": OBCacheJoint}[part]
    score = wrapper(inner=H2O(), group=how, obc_window=3).score
    agree(scene, score, expected)
    total = wrapper(inner=H2O(), obc_window=3).score
    assert scene.alike(lambda seen: score(seen) * scene.group, total) == (how == "mean")


@pytest.mark.parametrize("base", ["h2o", "scissorhands", "snapkv", "cake"])
def test_obcache_with_a_window_of_its_own(base):
    """It replaces the queries that are summed, not what the base protects and pools."""
    scene = Scene(seed=4, lengths=(20, 9), ragged=True)
    kernel = {"snapkv": 7, "cake": 5}.get(base)
    for own, inner in ((3, 6), (6, 3)):
        options = {"window": inner} | ({"recent": 2} if base in ("h2o", "scissorhands") else {})
        policy = ag.policy(f"{base}+obcache_value@uniform", 8, obc_window=own, **options)
        assert policy.lookback == (max(own, inner) - 1 if kernel else 0)

        def of_head(b, h, own=own):
            a, values = scene.dense(b, h)[0][-own:], scene.values(b, h // scene.group)
            return [float(a[:, p].square().sum() * v.square().sum()) for p, v in enumerate(values)]

        expected = by_group(scene, of_head, "sum")
        safe = inner if kernel else 0
        if kernel:
            expected = prefix_pooled(scene, expected, inner, kernel, policy.scorer.inner.pooling)
        agree(scene, policy.scorer.score, expected, skip=lambda b, g, p, safe=safe: p >= scene.lengths[b] - safe)
        protected = policy.scorer.protected(scene.seen, torch.tensor([8, 8]))
        assert torch.equal(protected, scene.seen.age < (inner if kernel else 2))


def test_a_window_for_a_base_without_one_is_refused():
    with pytest.raises(UserError, match="obc_window=16: Tova "):
        ag.policy("tova+obcache_key", 64, obc_window=16)


@pytest.mark.parametrize("schedule", ["blocks:7+every", "prefill"])
def test_an_own_window_sees_earlier_queries_in_blocks(tiny_llama, schedule):
    """obc_window beyond a block: with room for all, what is summed is the same in one piece."""
    model, found = tiny_llama(), []
    row = torch.randint(3, 128, (1, 30), generator=torch.Generator().manual_seed(2))
    for policy in (
        ag.policy("snapkv+obcache_joint", 10, schedule, obc_window=16, window=4),
        ag.policy("snapkv+obcache_joint", 10, schedule, obc_window=4, window=4),
    ):
        found.append(run(model, policy, row[:, :30], [25]).held)
    assert found[0] != found[1]


# ---- allocators


@pytest.mark.parametrize(
    ("budget", "window", "layers", "overshoot"),
    [(128, 8, 32, 4.6), (128, 8, 28, 5.0), (512, 32, 80, 4.5), (2048, 8, 32, 0.0)],
)
def test_pyramid_by_whole_steps_overshoots_as_published(budget, window, layers, overshoot):
    mean = budget - window
    official, exact = (pyramid(mean, 30000, layers, official_int=x) for x in (True, False))
    assert sum(exact) == mean * layers
    assert 100 * (sum(official) / (mean * layers) - 1) == pytest.approx(overshoot, abs=0.05 if overshoot else 0.7)
    steps = {high - low for high, low in pairwise(official)}
    assert len(steps) == 1
    assert official[0] == 2 * mean - mean // 20


def test_the_pyramid_of_a_policy_by_whole_steps():
    """25 tokens protected and 75 shared: from 147 down to 3 in 5 steps of 28, which is 28.8 rounded down."""
    scene, kept = Scene(lengths=(300,), queries=40), {}
    for official in (False, True):
        policy = ag.policy("pyramidkv", 100, window=25, official_int=official)
        decision = Decision(policy, list(range(6)))
        kept[official] = []
        for layer in range(6):
            seen = scene.seen
            seen.layer = layer
            kept[official].append(int(decision.decide(seen)[layer][0, 0].sum()))
    step = (147 - 3) // 5
    assert kept[True] == [25 + 147 - layer * step for layer in range(6)]
    assert sum(kept[False]) == 600 < sum(kept[True])


def shared_as_the_code_does(preference, total, caps):
    """Section 5.4 with lists: truncate, clip, spread the excess over unsaturated layers, make up the total, clip."""
    wanted = [int(p / sum(preference) * total) for p in preference]
    result = [min(w, cap) for w, cap in zip(wanted, caps, strict=True)]

    def spread(tokens):
        open_layers = [i for i in range(len(caps)) if result[i] < caps[i]]
        for place, i in enumerate(open_layers):
            result[i] += tokens // len(open_layers) + (place < tokens % len(open_layers))

    spread(sum(wanted) - sum(result))
    spread(total - sum(result))
    return [min(n, cap) for n, cap in zip(result, caps, strict=True)]


def test_preference_by_the_rounding_of_the_code():
    make, lost, differ = torch.Generator().manual_seed(0), 0, 0
    for _ in range(400):
        layers = int(torch.randint(1, 9, (1,), generator=make))
        preference = torch.randn(layers, generator=make, dtype=torch.float64).mul(2).exp()
        caps = torch.randint(5, 60, (layers,), generator=make)
        total = int(torch.randint(1, 25 * layers, (1,), generator=make))
        got = official_shares(preference[None], torch.tensor([total]), caps[None])[0].tolist()
        assert got == shared_as_the_code_does(preference.tolist(), total, caps.tolist())
        assert sum(got) <= total
        lost += sum(got) < min(total, int(caps.sum()))
        differ += total < int(caps.sum()) and sum(got) == total
    assert lost > 5  # the last clip loses some where preferences are spread out
    assert differ > 100


def test_preference_by_hand():
    shares = official_shares(
        torch.tensor([[70.0, 10.0, 10.0, 10.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64),
        torch.tensor([100, 7]),
        torch.tensor([[40, 50, 50, 11], [9, 9, 9, 9]]),
    )
    # 70 is cut to 40, and 30 go to three layers; the last of them has room for 1, and 9 are lost
    assert shares.tolist() == [[40, 20, 20, 11], [2, 2, 2, 1]]


def test_cake_with_the_rounding_of_the_code_keeps_the_budget(tiny_llama):
    """Through the whole model: never more than the budget; other layers than with exact shares somewhere."""
    differ = 0
    for seed in range(2):
        model = tiny_llama(seed=seed, num_hidden_layers=5)
        row = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(seed))
        kept = []
        for official in (False, True):
            policy = ag.policy("cake", 17, "every", window=4, official_int=official)
            result = run(model, policy, [row], [55])
            check(model, [row], result)
            kept.append([len(layer[0][0]) for layer in result.held[0]])
            assert kept[-1] == [len(layer[0][0]) for layer in result.held[-1]]
        assert sum(kept[0]) == 17 * 5
        assert 17 * 5 - 10 <= sum(kept[1]) <= 17 * 5
        differ += kept[0] != kept[1]
    assert differ


# ---- the order of evicting and attending


@pytest.mark.parametrize(
    ("name", "schedule", "side"),
    covering(
        name=["h2o", "snapkv+caote", "tova@heads", "h2o@pyramid", "gates"],
        schedule=["prefill", "steps:3", "blocks:7+every"],
        side=["left", "right"],
        allowed=lambda name, schedule, **_: (
            (schedule, name in ("h2o", "gates")) not in (("prefill", False), ("steps:3", True))
        ),  # these two alone record nothing, or all
    ),
)
def test_queries_that_attend_after_the_eviction(tiny_llama, name, schedule, side):
    """They see what is kept and themselves; alone, and in padded batches."""
    model, prompts = tiny_llama(), (29, 23)
    ag.attach(model, gates_for(model))
    rows = [torch.randint(3, 128, (p + 4,), generator=torch.Generator().manual_seed(p)) for p in prompts]
    options = {"snapkv+caote": SNAP, "scissorhands": {"recent": 3, "window": 9}}.get(name, {})
    after, before = (ag.policy(name, 12, schedule, evict_before_attend=x, **options) for x in (True, False))
    alone = [run(model, after, [row], [p]) for row, p in zip(rows, prompts, strict=True)]
    for row, result in zip(rows, alone, strict=True):
        check(model, [row], result)
    batch = run(model, after, rows, prompts, side)
    check(model, rows, batch)
    for b, single in enumerate(alone):
        assert [[layer[b] for layer in held] for held in batch.held] == [
            [layer[0] for layer in held] for held in single.held
        ]
    other = run(model, before, [rows[0]], [29])
    assert (alone[0].logits[0] - other.logits[0]).abs().max() > 1e-2


def test_evicting_before_attending_with_room_for_all_changes_nothing(tiny_llama):
    row = torch.randint(3, 128, (30,), generator=torch.Generator().manual_seed(0))
    policies = [ag.policy("h2o", 40, "blocks:7+every", evict_before_attend=x) for x in (False, True)]
    model = tiny_llama()
    results = [run(model, policy, [row], [25]) for policy in policies]
    hold(results[0].logits[0], results[1].logits[0], of_logits(model))


# ---- strict


@pytest.mark.parametrize("allocator", ["uniform", "pyramid", "preference", "heads"])
def test_what_is_protected_stays_where_the_budget_is_smaller(allocator):
    scene = Scene(lengths=(30, 6))
    options = {"window": 8, "sinks": 3}
    with refuses(UserError, "budget=5", "5 tokens", "11"):
        decide(ag.policy(f"snapkv@{allocator}", 5, strict=True, **options), scene)
    with pytest.warns(BudgetWarning):
        keep = decide(ag.policy(f"snapkv@{allocator}", 5, **options), scene)
    for b, g in scene.places():
        first = scene.lengths[b] - 8
        wanted = [i for i, p in enumerate(scene.held[b][g]) if p < 3 or p >= first]
        assert keep[b, g].nonzero().flatten().tolist() == wanted
    roomy = [decide(ag.policy(f"snapkv@{allocator}", 14, strict=x, **options), scene) for x in (True, False)]
    assert torch.equal(*roomy)


@pytest.mark.parametrize("schedule", ["blocks:7+every", "steps:3"])
@pytest.mark.parametrize("allocator", ["uniform", "pyramid", "heads", "preference"])
def test_what_is_protected_stays_over_time(tiny_llama, allocator, schedule):
    rows = [torch.randint(3, 128, (n + 6,), generator=torch.Generator().manual_seed(n)) for n in (29, 8)]
    policy = ag.policy(f"snapkv@{allocator}", 5, schedule, window=8, sinks=3)
    model = tiny_llama()
    with pytest.warns(BudgetWarning):
        result = feed(ag.EvictionCache(model, policy), model, rows, [[29, 8], *[[1, 1]] * 6])
    for b, prompt in enumerate((29, 8)):
        for layer in result.held[-1]:
            for head in layer[b]:
                n = prompt + 6
                assert set(range(3)) | set(range(n - 8, n)) <= set(head)
                assert len(head) <= 11 + (2 if "steps" in schedule else 0)
