"""Wrappers and their options against what they stand for: removing a token, shrinking a pair, autograd; in float64."""

import math

import pytest
import torch

from ag.engine.scorers.cake import Cake
from ag.engine.scorers.controls import KNorm
from ag.engine.scorers.gates import Gates
from ag.engine.scorers.h2o import H2O
from ag.engine.scorers.scissorhands import Scissorhands
from ag.engine.scorers.snapkv import SnapKV
from ag.engine.wrappers import WRAPPERS
from ag.engine.wrappers.caote import Caote, FastCaote, removal_error
from ag.engine.wrappers.criticalkv import CriticalKV
from ag.engine.wrappers.obcache import OBCacheJoint, OBCacheKey, OBCacheValue
from ag.engine.wrappers.vatp import Vatp
from tests.support.attention_by_hand import SINKS_AND_CAP, Scene, agree, by_group, group_mean, pooled_before, within
from tests.support.bounds import conditioned, hold

SCENES = {
    "group3-left": {"lengths": (11, 5, 1), "heads": 6},
    "ragged": {"lengths": (15, 6), "ragged": True},
    "sharp": {"lengths": (10,), "sharp": 6.0},
    "sinks-and-cap": {"lengths": (10, 4), "ragged": True, "softmax": SINKS_AND_CAP},
}
PARTS = {"value": (1.0, 0.0), "key": (0.0, 1.0), "joint": (1.0, 1.0)}  # how much of v and of k is pruned
OBCACHE = {"value": OBCacheValue, "key": OBCacheKey, "joint": OBCacheJoint}
#: Scorers with rows, and of how many of the last queries (None: all).
ROW_BASES = {
    "h2o": (H2O(recent=2), None),
    "scissorhands": (Scissorhands(window=4, recent=3), 4),
    "snapkv-avg": (SnapKV(window=2, kernel=5, pooling="avg", sinks=1), 2),
    "cake": (Cake(window=3), 3),
}


@pytest.fixture(params=SCENES, ids=str)
def scene(request):
    return Scene(seed=21, **SCENES[request.param])


def window_of(base):
    """The window that is protected, and left out of what is pooled."""
    return base.window if isinstance(base, SnapKV) else 0


def pooled_prefix(scene, base, scores):
    """Pool the lists as the base does, on the tokens before its window; 0 on the window."""
    if not isinstance(base, SnapKV):
        return scores
    return pooled_before(scene, scores, base.window, base.kernel, base.pooling)


# ---- VATP


@pytest.mark.parametrize("base", ROW_BASES, ids=str)
def test_vatp_multiplies_by_the_norm_of_values(scene, base):
    """Before the base pools."""
    inner, _ = ROW_BASES[base]
    inputs = scene.inputs(inner)
    score = inner.reduce(inputs, inner.sums(inputs))  # ``test_scorers`` holds it to its formula
    scores = {(b, g): score[b, g, : len(scene.held[b][g])].tolist() for b, g in scene.places()}
    for (b, g), values in scores.items():
        for slot, value in enumerate(scene.values(b, g)):
            values[slot] *= sum(abs(float(x)) for x in value)
    agree(scene, Vatp(inner=inner), pooled_prefix(scene, inner, scores), skip=within(scene, window_of(inner)))


# ---- OBCache


def errors(a, s, values, part):
    """The error of pruning each key by the queries of ``a`` and ``s [queries, keys]``, a list."""
    (by_value, by_key), outputs = PARTS[part], a @ values
    return [
        sum(
            float((a[i, p] * (by_value * v + by_key * s[i, p] * (v - outputs[i]))).square().sum())
            for i in range(len(a))
        )
        for p, v in enumerate(values)
    ]


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("base", ROW_BASES, ids=str)
def test_obcache_sums_the_error_over_the_queries_of_its_base_and_the_group(scene, base, part):
    inner, last = ROW_BASES[base]

    def of_head(b, h):
        a, s, _ = scene.dense(b, h)
        return errors(a[-(last or 99) :], s[-(last or 99) :], scene.values(b, h // scene.group), part)

    wanted = pooled_prefix(scene, inner, by_group(scene, of_head, "sum"))
    agree(scene, OBCACHE[part](inner=inner), wanted, skip=within(scene, window_of(inner)))


# ---- CAOTE


def changes(scene, b, g, weights, fast=False):
    """Of each held slot, the change of the group's outputs when it alone goes and the rest is normalised anew.

    ``weights(b, h)``: a list of what each slot is paid; ``fast``: the distance is that to the mean of the values.
    """
    values = scene.values(b, g)
    held = range(len(values))
    mean, result = sum(values[i] for i in held) / len(held), {}
    for i in held:
        total = 0.0
        for h in scene.query_heads(g):
            paid = weights(b, h)
            weight = {j: paid[j] / sum(paid[j] for j in held) for j in held}
            rest = sum(weight[j] for j in held if j != i)
            if fast:
                total += (weight[i] / max(1 - weight[i], 1e-6) * float((mean - values[i]).norm())) ** 2
                continue
            whole = sum(weight[j] * values[j] for j in held)
            without = sum((weight[j] / rest * values[j] for j in held if j != i), torch.zeros_like(values[0]))
            total += float((whole - without).square().sum())
        result[i] = math.sqrt(total)
    return result


@pytest.mark.parametrize("fast", [False, True], ids=["caote", "fastcaote"])
@pytest.mark.parametrize("base", ROW_BASES, ids=str)
def test_caote_is_the_change_of_the_output_on_removal(scene, base, fast):
    """Of the group's concatenated outputs; under tova by KV head those are the outputs of the newest query."""
    inner, _ = ROW_BASES[base]
    heads = inner.heads(scene.inputs(inner)).double()
    expected = {x: [*changes(scene, *x, lambda b, h: heads[b, h].tolist(), fast=fast).values()] for x in scene.places()}
    scorer = (FastCaote if fast else Caote)(inner=inner)
    agree(scene, scorer, expected, skip=lambda b, g, p: fast and scene.lengths[b] < 2)


def removal(weights, values):
    """``h_j / (1 - h_j) ||sum_p h_p (v_p - v_j)||``, pair by pair; ``1 - h_j`` is the sum of the others."""
    others = (weights * (1 - torch.eye(len(weights), dtype=torch.float64))).sum(-1)
    moved = (weights[:, None] * (values - values[:, None])).sum(1)
    return weights / others * moved.norm(dim=-1) / weights.sum()


@pytest.mark.parametrize(("gap", "offset"), [(0.5, 100.0), (1e-7, 0.0), (1e-35, 0.0)])
def test_weights_near_one_and_values_far_from_the_origin(gap, offset):
    """float32 weights, of which the largest may round to 1."""
    make = torch.Generator().manual_seed(1)
    values = torch.randn(6, 4, generator=make, dtype=torch.float64) + offset
    for top in range(6):
        weights = torch.rand(6, generator=make, dtype=torch.float64)
        weights[top] = 0.0
        weights *= gap / weights.sum()
        weights[top] = 1 - gap
        # the others move the output by their weight, which a denominator clamped at 1e-6 must not shrink
        got = removal_error(weights.float(), values.float())
        operands = weights.float().double(), values.float().double()
        hold(got, removal(*operands), conditioned(removal, *operands))
        assert got.argmax() == top or offset


@pytest.mark.parametrize("base", [KNorm(), Gates()], ids=["knorm", "gates"])
def test_caote_on_a_score_without_rows_shifts_numbers_below_zero_up(base):
    scene = Scene(seed=5, lengths=(9, 5), gate=True)
    inputs = scene.inputs(base)
    plain = base.weight(inputs, base.score(inputs)).double()  # of gates the probability

    def shifted(b, h):
        mine = plain[b, h // scene.group, : scene.lengths[b]]
        return (mine - mine.min().clamp_max(0)).tolist()

    agree(scene, Caote(inner=base), {x: [*changes(scene, *x, shifted).values()] for x in scene.places()})


# ---- CriticalKV


def projected_sizes(scene, b, g):
    """Mean over the group of the sum of absolute entries that each value writes, a list."""
    heads = [scene.values(b, g) @ scene.output[h].double() for h in scene.query_heads(g)]
    return group_mean([x.abs().sum(-1).tolist() for x in heads])


@pytest.mark.parametrize("base", [SnapKV(window=3, kernel=3), KNorm(), Gates()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("shape", [{"lengths": (11, 5, 1), "heads": 6}, {"lengths": (15, 6), "ragged": True}])
def test_criticalkv_is_the_base_score_and_its_product(shape, base):
    scene = Scene(seed=21, gate=True, **shape)
    scorer = CriticalKV(inner=base)
    inputs, product = scene.inputs(scorer), {}
    plain = base.score(scene.inputs(base))
    weight = plain.sigmoid() if isinstance(base, Gates) else plain  # the probability
    for b, g in scene.places():
        mine = weight[b, g, : len(scene.held[b][g])].tolist()
        lowest = min(0.0, *mine, 0.0)  # the product alone is of a score that is shifted
        product[b, g] = [(s - lowest + 1e-4) * u for s, u in zip(mine, projected_sizes(scene, b, g), strict=True)]
    score = scorer.score(inputs)
    second, share = scorer.second(inputs, score)
    assert torch.equal(score[inputs.key_valid], plain[inputs.key_valid])
    agree(scene, scorer, product, score=lambda inputs: scorer.second(inputs, scorer.score(inputs))[0])
    assert share == 0.5
    again, _ = scorer.second(inputs, score)  # remembered
    assert torch.equal(again, second)


# ---- all wrappers


COMBINATIONS = [
    pytest.param(WRAPPERS[wrapper](inner=inner), id=f"{base}+{wrapper}")
    for wrapper in WRAPPERS
    for base, (inner, _) in (ROW_BASES | {"knorm": (KNorm(), 0), "gates": (Gates(recent=2), 0)}).items()
    if WRAPPERS[wrapper].__dataclass_fields__["inner"].type != "RowScorer" or base in ROW_BASES
]


@pytest.mark.parametrize("scorer", COMBINATIONS)
def test_scores_are_finite_with_masked_pairs_and_huge_logits(scorer):
    scene = Scene(seed=8, lengths=(14, 1, 6), ragged=True, dtype=torch.float16, sharp=300.0, gate=True)
    inputs, valid = scene.inputs(scorer), scene.reader.key_valid
    score = scorer.score(inputs)
    second, _ = scorer.second(inputs, score) or (score, 1.0)
    for values in (score, second):
        assert values.dtype == torch.float32
        assert values.shape == valid.shape
        assert bool(values[valid].isfinite().all())
    assert float(second[valid].min()) >= 0  # a first score beside it may be of any sign


@pytest.mark.parametrize("scorer", COMBINATIONS)
def test_free_slots_change_nothing(scorer):
    clean, dirty = (Scene(seed=8, lengths=(14, 6), ragged=True, gate=True) for _ in range(2))
    valid = clean.reader.key_valid
    dirty._parts[1][~valid], dirty._parts[2][~valid] = 1e30, float("nan")
    scores = [scorer.score(scene.inputs(scorer))[valid] for scene in (clean, dirty)]
    assert torch.equal(*scores)
