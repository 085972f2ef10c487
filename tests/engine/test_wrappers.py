"""Wrappers and their options against what they stand for: removing a token, shrinking a pair, autograd; in float64."""

import math

import pytest
import torch

from ag.engine.rows import AttentionRows
from ag.engine.scorers.cake import Cake
from ag.engine.scorers.controls import KNorm
from ag.engine.scorers.gates import Gates
from ag.engine.scorers.h2o import H2O
from ag.engine.scorers.scissorhands import Scissorhands
from ag.engine.scorers.snapkv import SnapKV
from ag.engine.scorers.tova import Tova
from ag.engine.values import Values
from ag.engine.wrappers import WRAPPERS
from ag.engine.wrappers.caote import Caote, FastCaote, removal_error
from ag.engine.wrappers.obcache import OBCacheJoint, OBCacheKey, OBCacheValue, joint_error, key_error, value_error
from ag.engine.wrappers.vatp import Vatp
from tests.support.attention_by_hand import SINKS_AND_CAP, Scene, agree, by_group, pooled_before, within
from tests.support.bounds import conditioned, hold

SCENES = {
    "group3-left": {"lengths": (11, 5, 1), "heads": 6},
    "ragged": {"lengths": (15, 6), "ragged": True},
    "sharp": {"lengths": (10,), "sharp": 6.0},
    "sinks-and-cap": {"lengths": (10, 4), "ragged": True, "softmax": SINKS_AND_CAP},
}
PARTS = {"value": (1.0, 0.0), "key": (0.0, 1.0), "joint": (1.0, 1.0)}  # how much of v and of k is pruned
CLOSED = {"value": value_error, "key": key_error, "joint": joint_error}
OBCACHE = {"value": OBCacheValue, "key": OBCacheKey, "joint": OBCacheJoint}
#: Scorers with rows, and of how many of the last queries (None: all).
ROW_BASES = {
    "h2o": (H2O(recent=2), None),
    "scissorhands": (Scissorhands(window=4, recent=3), 4),
    "tova-head": (Tova(scope="kv_head"), 1),
    "snapkv": (SnapKV(window=3, kernel=3), 3),
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
    score = inner.reduce(scene.seen, inner.raw(scene.seen))  # ``test_scorers`` holds it to its formula
    scores = {(b, g): score[b, g, : len(scene.held[b][g])].tolist() for b, g in scene.places()}
    for (b, g), values in scores.items():
        for slot, value in enumerate(scene.values(b, g)):
            values[slot] *= sum(abs(float(x)) for x in value)
    agree(scene, Vatp(inner=inner).score, pooled_prefix(scene, inner, scores), skip=within(scene, window_of(inner)))


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


def shrunk_outputs(q, k, v, p, by_value, by_key):
    """Outputs ``[G, queries, D]`` with one pair scaled by ``1 - by_value`` and ``1 - by_key``."""
    chosen = (torch.arange(len(k)) == p).double()[:, None]
    logits = q @ (k * (1 - chosen * by_key)).T
    return logits.masked_fill(~visible(q, k), -torch.inf).softmax(-1) @ (v * (1 - chosen * by_value))


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_closed_forms_are_the_first_order_change(part):
    """``sum_i ||d o_i||^2`` with ``d o_i = -A [v + s (v - o_i)]``, and the derivative that autograd finds."""
    made = q, k, v = in_float64()

    def closed_form(*made):
        return rows_of(*made).total(CLOSED[part])[0]

    rows, closed = rows_of(*made), closed_form(*made)
    bound = 2 * conditioned(closed_form, *made, dtype=torch.float64)  # of two that round apart
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
    agree(scene, OBCACHE[part](inner=inner).score, wanted, skip=within(scene, window_of(inner)))


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
    heads = inner.heads(scene.seen).double()
    expected = {x: [*changes(scene, *x, lambda b, h: heads[b, h].tolist(), fast=fast).values()] for x in scene.places()}
    scorer = (FastCaote if fast else Caote)(inner=inner)
    agree(scene, scorer.score, expected, skip=lambda b, g, p: fast and scene.lengths[b] < 2)


def removal(weights, values):
    """``h_j / (1 - h_j) ||sum_p h_p (v_p - v_j)||``, pair by pair; ``1 - h_j`` is the sum of the others."""
    others = (weights * (1 - torch.eye(len(weights), dtype=torch.float64))).sum(-1)
    moved = (weights[:, None] * (values - values[:, None])).sum(1)
    return weights / others * moved.norm(dim=-1) / weights.sum()


@pytest.mark.parametrize("gap", [1e-3, 1e-7, 1e-20, 1e-35])
def test_weights_near_one(gap):
    """float32 weights, of which the largest rounds to 1."""
    make = torch.Generator().manual_seed(1)
    values = torch.randn(6, 4, generator=make, dtype=torch.float64)
    for top in range(6):
        weights = torch.rand(6, generator=make, dtype=torch.float64)
        weights[top] = 0.0
        weights *= gap / weights.sum()
        weights[top] = 1 - gap
        # the others move the output by their weight, which a denominator clamped at 1e-6 must not shrink
        got = removal_error(weights.float(), values.float())
        operands = weights.float().double(), values.float().double()
        hold(got, removal(*operands), conditioned(removal, *operands))
        assert got.argmax() == top


def test_a_weight_of_exactly_one():
    values = torch.tensor([[3.0, 4.0], [1.0, 1.0], [2.0, 0.0]])
    got = removal_error(torch.tensor([1.0, 0.0, 0.0]), values)
    assert got.tolist() == [5.0, 0.0, 0.0]


@pytest.mark.parametrize("base", [KNorm(), Gates()], ids=["knorm", "gates"])
def test_caote_on_a_score_without_rows_shifts_it_to_zero(base):
    scene = Scene(seed=5, lengths=(9, 5), gate=True)
    plain = base.score(scene.seen).double()

    def shifted(b, h):
        mine = plain[b, h // scene.group, : scene.lengths[b]]
        return (mine - mine.min()).tolist()

    agree(scene, Caote(inner=base).score, {x: [*changes(scene, *x, shifted).values()] for x in scene.places()})


# ---- all wrappers


COMBINATIONS = [
    pytest.param(WRAPPERS[wrapper](inner=inner), id=f"{base}+{wrapper}")
    for wrapper in WRAPPERS
    for base, (inner, _) in (ROW_BASES | {"knorm": (KNorm(), 0), "gates": (Gates(recent=2), 0)}).items()
    if WRAPPERS[wrapper].__dataclass_fields__["inner"].type != "RowScorer" or base in ROW_BASES
]


@pytest.mark.parametrize("scorer", COMBINATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
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
