"""Every scorer against its formula in plain loops (``attention_by_hand``), and the identities between them."""

import pytest
import torch

from ag.engine.scorers import SCORERS, RowScorer
from ag.engine.scorers.cake import Cake
from ag.engine.scorers.controls import KNorm, Random
from ag.engine.scorers.gates import Gates
from ag.engine.scorers.h2o import H2O
from ag.engine.scorers.keydiff import KeyDiff
from ag.engine.scorers.scissorhands import Scissorhands
from ag.engine.scorers.snapkv import SnapKV
from ag.engine.scorers.streaming_llm import StreamingLLM
from ag.engine.scorers.tova import Tova
from ag.engine.select import select
from tests.support.attention_by_hand import Scene, agree, group_mean, pool
from tests.support.bounds import hold

EPS = torch.finfo(torch.float32).eps
SCENES = {
    "one": {"lengths": (12,)},
    "mha": {"lengths": (12, 12), "heads": 2, "kv_heads": 2},
    "left": {"lengths": (13, 6, 1), "padding": "left"},
    "right": {"lengths": (5, 14), "padding": "right"},
    "ragged": {"lengths": (16, 7), "ragged": True},
    "sharp": {"lengths": (12,), "sharp": 8.0, "heads": 6},
}


@pytest.fixture(params=SCENES, ids=str)
def scene(request):
    return Scene(seed=11, **SCENES[request.param])


def by_head(scene, of_head):
    """The group's mean of a list for each query head."""
    return {(b, g): group_mean([of_head(b, h) for h in scene.query_heads(g)]) for b, g in scene.places()}


def protected_tokens(scene, scorer, capacity):
    mask = scorer.protected(scene.seen, torch.tensor(capacity))
    return {(b, g): [p for i, p in enumerate(scene.held[b][g]) if mask[b, g, i]] for b, g in scene.places()}


def newest(scene, count, first=0):
    return {
        (b, g): [p for p in scene.held[b][g] if p < first or p >= scene.lengths[b] - count] for b, g in scene.places()
    }


def prefix(scene, window):
    """What a test should skip: the tokens of the window."""
    return lambda b, g, p: p >= scene.lengths[b] - window


def pooled_prefix(scene, of_head, window, kernel, kind, first_pool=False):
    """The group's mean over the tokens before the window, pooled there; 0 on the window."""
    result = {}
    for b, g in scene.places():
        before = [i for i, p in enumerate(scene.held[b][g]) if p < scene.lengths[b] - window]
        heads = [[of_head(b, h)[i] for i in before] for h in scene.query_heads(g)]
        if first_pool:
            score = group_mean([pool(x, kernel, kind) for x in heads])
        else:
            score = pool(group_mean(heads), kernel, kind)
        result[b, g] = score + [0.0] * (len(scene.held[b][g]) - len(before))
    return result


def test_streaming_llm(scene):
    scorer = StreamingLLM(sinks=2)
    agree(scene, scorer.score, {x: [float(p) for p in scene.held[x[0]][x[1]]] for x in scene.places()})
    assert protected_tokens(scene, scorer, [8] * len(scene.lengths)) == newest(scene, 0, first=2)
    assert StreamingLLM().sinks == 4


def test_streaming_llm_keeps_the_first_and_the_newest():
    seen = Scene(lengths=(20,)).seen
    scorer, capacity = StreamingLLM(), torch.tensor([9])
    keep = select(scorer.score(seen), scorer.protected(seen, capacity), seen.key_valid, torch.full((1, 2), 9))
    assert keep[0, 1].nonzero().flatten().tolist() == [0, 1, 2, 3, 15, 16, 17, 18, 19]


def test_h2o_sums_every_query(scene):
    agree(scene, H2O().score, by_head(scene, scene.column_sums))


@pytest.mark.parametrize("window", [1, 4, 50])
def test_h2o_with_a_window(scene, window):
    agree(scene, H2O(window=window).score, by_head(scene, lambda b, h: scene.column_sums(b, h, window)))


@pytest.mark.parametrize(
    ("recent", "counts"), [(0.5, [3, 4, 0]), (0.25, [1, 2, 0]), (3, [3, 3, 3]), (0, [0, 0, 0]), (1.0, [7, 8, 1])]
)
def test_h2o_defaults_and_protection(recent, counts):
    scene = Scene(lengths=(13, 9, 5), ragged=True)
    assert (H2O().recent, H2O().window, H2O().sinks) == (0.5, None, 0)
    got = protected_tokens(scene, H2O(recent=recent, sinks=1), [7, 8, 1])  # floor(7 / 2) = 3
    assert got == {
        (b, g): [p for p in scene.held[b][g] if p < 1 or p >= scene.lengths[b] - counts[b]] for b, g in scene.places()
    }


@pytest.mark.parametrize("window", [1, 5, 400])
def test_scissorhands_sums_a_window(scene, window):
    agree(scene, Scissorhands(window=window).score, by_head(scene, lambda b, h: scene.column_sums(b, h, window)))


@pytest.mark.parametrize("window", [4, 400])
def test_scissorhands_counts_what_is_not_below_uniform(scene, window):
    def counted(b, h):
        a, _, visible = scene.dense(b, h)
        first, total = max(0, len(a) - window), [0.0] * a.shape[1]
        for i in range(first, len(a)):
            seen = int(visible[i].sum())
            for j in range(a.shape[1]):
                total[j] += bool(visible[i, j]) and float(a[i, j]) >= (1 - 1e-12) / seen
        return total

    agree(scene, Scissorhands(window=window, count=True).score, by_head(scene, counted))


def test_uniform_attention_counts_for_every_key_that_is_seen():
    scene = Scene(lengths=(150,), heads=1, kv_heads=1, sharp=0.0)
    score = Scissorhands(count=True).score(scene.seen)
    assert score[0, 0].tolist() == [150.0 - p for p in range(150)]


def test_scissorhands_defaults():
    scene = Scene(lengths=(30,))
    assert (Scissorhands().window, Scissorhands().recent, Scissorhands().count) == (400, 10, False)
    assert protected_tokens(scene, Scissorhands(), [20]) == newest(scene, 10)


def test_tova_averages_the_layer(scene):
    expected = {}
    for b, g in scene.places():
        expected[b, g] = []
        for p in scene.held[b][g]:
            paid = 0.0
            for h in range(scene.heads):
                held = scene.held[b][h // scene.group]
                if p in held:  # a head that no longer holds the token pays it nothing
                    paid += float(scene.dense(b, h)[0][-1, held.index(p)])
            expected[b, g].append(paid / scene.heads)
    agree(scene, Tova().score, expected)


def test_tova_in_layer_scope_keeps_the_same_in_every_head():
    scene = Scene(lengths=(15, 8))
    score, bound = Tova().score(scene.seen), scene.bound(Tova().score)
    for b, n in enumerate((15, 8)):
        assert torch.equal(score[b, 0, :n], score[b, 1, :n])
        hold(score[b, 0, :n].sum(), 1.0, bound[b, 0, :n].sum())


def test_tova_by_kv_head(scene):
    agree(scene, Tova(scope="kv_head").score, by_head(scene, lambda b, h: scene.column_sums(b, h, 1)))
    assert protected_tokens(scene, Tova(), [4] * len(scene.lengths)) == newest(scene, 1)
    assert protected_tokens(scene, Tova(recent=0), [4] * len(scene.lengths)) == newest(scene, 0)


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize(("window", "kernel"), [(3, 5), (2, 7), (1, 1), (4, 3)])
def test_snapkv_pools_the_prefix_only(scene, window, kernel, kind):
    scorer = SnapKV(window=window, kernel=kernel, pooling=kind)
    expected = pooled_prefix(scene, lambda b, h: scene.column_sums(b, h, window), window, kernel, kind)
    agree(scene, scorer.score, expected, skip=prefix(scene, window))
    assert protected_tokens(scene, scorer, [9] * len(scene.lengths)) == newest(scene, window)


def test_snapkv_defaults_and_protection():
    scorer = SnapKV()
    assert (scorer.window, scorer.kernel, scorer.pooling) == (32, 7, "max")
    scene = Scene(lengths=(50,))
    assert protected_tokens(scene, scorer, [40]) == newest(scene, 32)
    assert protected_tokens(scene, SnapKV(window=4, recent=7, sinks=2), [40]) == newest(scene, 7, first=2)
    assert protected_tokens(scene, SnapKV(window=9, recent=7), [40]) == newest(scene, 9)


def test_average_pooling_damps_both_ends_of_the_prefix():
    """Uniform attention in the window: 0.6 and 0.8 of it at the edges with a kernel of 5 (spec 2.4)."""
    scene = Scene(lengths=(24,), sharp=0.0)

    def damped(seen):
        score = SnapKV(window=4, kernel=5, pooling="avg").score(seen)[0, 0, :20]
        return score / score[10]

    hold(damped(scene.seen), torch.tensor([0.6, 0.8] + [1.0] * 16 + [0.8, 0.6]), scene.bound(damped))


@pytest.mark.parametrize("gamma", [0.0, 1.0, 200.0])
@pytest.mark.parametrize("window", [1, 5])
def test_cake_is_mean_and_unbiased_variance(scene, gamma, window):
    def indicator(b, h):
        a = scene.dense(b, h)[0][-window:]
        result = []
        for j in range(a.shape[1]):
            column = [float(x) for x in a[:, j]]
            mean = sum(column) / len(column)
            squares = sum((x - mean) ** 2 for x in column)
            result.append(mean + gamma * (squares / (len(column) - 1) if len(column) > 1 else 0.0))
        return result

    expected = pooled_prefix(scene, indicator, window, 5, "avg", first_pool=True)  # as in the paper's code
    agree(scene, Cake(window=window, gamma=gamma).score, expected, skip=prefix(scene, window))


def test_cake_defaults():
    scorer = Cake()
    assert (scorer.window, scorer.kernel, scorer.pooling, scorer.gamma) == (32, 5, "avg", 200.0)
    scene = Scene(lengths=(50,))
    assert protected_tokens(scene, scorer, [40]) == newest(scene, 32)


def unit(vector):
    length = sum(float(x) ** 2 for x in vector) ** 0.5
    return [float(x) / length for x in vector]


def test_keydiff_is_the_cosine_to_the_mean_direction(scene):
    expected = {}
    for b, g in scene.places():
        keys = [unit(scene.k[b, g, i]) for i in range(len(scene.held[b][g]))]
        mean = unit([sum(x) / len(keys) for x in zip(*keys, strict=True)])
        expected[b, g] = [-sum(x * y for x, y in zip(key, mean, strict=True)) for key in keys]
    agree(scene, KeyDiff().score, expected)
    assert protected_tokens(scene, KeyDiff(), [8] * len(scene.lengths)) == newest(scene, 0)


def test_keydiff_ranks_by_the_mean_cosine_to_all_keys_whatever_their_lengths():
    scene = Scene(seed=4, lengths=(15,))
    score, bound = KeyDiff().score(scene.seen), scene.bound(KeyDiff().score)
    for _, g in scene.places():
        keys = torch.tensor([unit(k) for k in scene.k[0, g]], dtype=torch.float64)
        similar = (keys @ keys.T).sum(1)
        assert score[0, g].argsort().tolist() == (-similar).argsort().tolist()
    scene._parts[1][:] *= torch.rand(15)[:, None] + 0.1
    hold(KeyDiff().score(scene.seen), score, bound + scene.bound(KeyDiff().score))


def test_keydiff_of_keys_that_are_equal_or_cancel():
    scene = Scene(seed=4, lengths=(6,))
    scene._parts[1][:] = scene._parts[1][:, :, :1]
    hold(KeyDiff().score(scene.seen), -torch.ones(1, 2, 6), scene.bound(KeyDiff().score))
    scene._parts[1][:] = torch.tensor([1.0] * 4 + [0.0] * 4)  # of which no sum rounds, in whatever order
    scene._parts[1][:, :, 3:] *= -1
    assert not KeyDiff().score(scene.seen).any()


def test_knorm(scene):
    expected = {
        (b, g): [-(sum(float(x) ** 2 for x in scene.k[b, g, i]) ** 0.5) for i in range(len(scene.held[b][g]))]
        for b, g in scene.places()
    }
    agree(scene, KNorm().score, expected)
    assert protected_tokens(scene, KNorm(), [4] * len(scene.lengths)) == newest(scene, 0)


def test_gates_are_the_probability():
    scene = Scene(lengths=(9, 4), gate=True)
    assert torch.equal(Gates().score(scene.seen), scene.gate)
    assert protected_tokens(scene, Gates(), [4, 4]) == newest(scene, 0)
    assert protected_tokens(scene, Gates(sinks=1, recent=2), [4, 4]) == newest(scene, 2, first=1)


def test_a_layer_without_a_gate_keeps_the_first_tokens():
    seen = Scene(lengths=(9,)).seen
    score = Gates().score(seen)
    assert score.dtype == torch.float32
    keep = select(score, torch.zeros_like(seen.key_valid), seen.key_valid, torch.full((1, 2), 4))
    assert keep[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_random_depends_on_seed_layer_head_and_place_only():
    one, padded = Scene(lengths=(9,)), Scene(lengths=(30, 9), seed=2, padding="right", ragged=True)
    score = Random().score(one.seen)
    again = Random().score(padded.seen)
    for g in range(2):
        for slot, p in enumerate(padded.held[1][g]):
            assert float(again[1, g, slot]) == float(score[0, g, p])
    different = [Random(seed=1).score(one.seen), Random().score(Scene(lengths=(9,), layer=1).seen), score.flip(1)]
    for other in different:
        assert not torch.eq(other, score).any()


def test_random_is_uniform_and_uncorrelated():
    scenes = [Scene(lengths=(3000,), layer=layer, dim=1) for layer in (0, 1, 5)]
    draws = [Random(seed=seed).score(scene.seen)[0] for seed in (0, 1, 7) for scene in scenes]
    flat = torch.stack(draws).flatten(0, 1).double()  # 18 series of 3,000
    counts = torch.stack([(row * 10).floor().long().bincount(minlength=10) for row in flat])
    chi = ((counts - 300.0) ** 2 / 300).sum(1)  # 9 degrees of freedom: 99.99 % are below 33.7
    assert counts.shape == (18, 10)
    assert float(chi.max()) < 34
    assert float(flat.min()) >= 0
    assert float(flat.max()) < 1
    correlation = torch.corrcoef(flat) - torch.eye(18)
    assert float(correlation.abs().max()) < 0.08  # 4.4 standard deviations of 1 / sqrt(3000)
    lagged = torch.stack([torch.corrcoef(torch.stack([row[:-lag], row[lag:]]))[0, 1] for row in flat for lag in (1, 2)])
    assert float(lagged.abs().max()) < 0.08


@pytest.mark.parametrize("name", SCORERS)
def test_scores_are_finite_float32_where_tokens_compete(name):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        scene = Scene(seed=8, lengths=(14, 1, 6), ragged=True, dtype=dtype, sharp=30.0, gate=True)
        score = SCORERS[name]().score(scene.seen)
        assert score.dtype == torch.float32
        assert score.shape == scene.seen.key_valid.shape
        assert bool(score[scene.seen.key_valid].isfinite().all())


@pytest.mark.parametrize("name", SCORERS)
def test_scores_by_query_head_are_not_negative_and_cover_every_token(name):
    """What CAOTE normalises: no window cut out, nothing below 0, the pooling over all held tokens."""
    scene = Scene(seed=9, lengths=(14, 5), ragged=True, gate=True)
    scorer = SCORERS[name]()
    heads = scorer.heads(scene.seen)
    assert heads.shape == (2, 4, scene.seen.k.shape[2])
    assert float(heads.min()) >= 0
    if isinstance(scorer, SnapKV):
        for b, g in scene.places():
            for h in scene.query_heads(g):
                raw = scorer.raw(scene.seen)[b, h, : len(scene.held[b][g])].tolist()
                wanted = torch.tensor(pool(raw, scorer.kernel, scorer.pooling), dtype=torch.float64)
                hold(heads[b, h, : len(raw)], wanted, 2 * (scorer.kernel + 1) * EPS * wanted)  # a mean of so many
    elif isinstance(scorer, RowScorer):
        assert torch.equal(heads, scorer.raw(scene.seen))
    else:  # shifted, so that the least becomes 0
        score = scorer.score(scene.seen)
        for b, g in scene.places():
            mine = score[b, g, : len(scene.held[b][g])]
            for h in scene.query_heads(g):
                assert torch.equal(heads[b, h, : len(mine)], mine - mine.min())


def kept(scene, scorer, capacity):
    count = torch.full((len(scene.lengths),), capacity)
    limit = count[:, None].expand(-1, scene.kv_heads)
    return select(scorer.score(scene.seen), scorer.protected(scene.seen, count), scene.seen.key_valid, limit)


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_snapkv_of_one_query_is_tova_by_kv_head(scene, kind):
    snapkv, tova = SnapKV(window=1, kernel=1, pooling=kind), Tova(scope="kv_head")
    before = scene.seen.key_valid & (scene.seen.age >= 1)
    assert torch.equal(snapkv.score(scene.seen)[before], tova.score(scene.seen)[before])
    assert torch.equal(kept(scene, snapkv, 5), kept(scene, tova, 5))


def test_cake_without_variance_ranks_like_snapkv(scene):
    snapkv = SnapKV(window=4, kernel=5, pooling="avg")
    for capacity in range(4, 13):
        assert torch.equal(kept(scene, Cake(window=4, gamma=0.0), capacity), kept(scene, snapkv, capacity))


def test_h2o_of_a_window_is_snapkv_before_pooling(scene):
    hold(H2O(window=4).sums(scene.seen), SnapKV(window=4).sums(scene.seen), 2 * scene.bound(SnapKV(window=4).sums))
    assert torch.equal(H2O(window=4, recent=4).score(scene.seen), Scissorhands(window=4).score(scene.seen))
    assert torch.equal(
        kept(scene, H2O(window=4, recent=4), 6), kept(scene, SnapKV(window=4, kernel=1, pooling="avg"), 6)
    )


def test_h2o_of_a_window_over_everything_is_h2o(scene):
    bound = 2 * scene.bound(H2O().score)  # of two that round apart
    hold(H2O(window=max(scene.lengths)).score(scene.seen), H2O().score(scene.seen), bound)


def test_h2o_favours_the_first_tokens():
    """Uniform attention over 200 tokens: the first is paid 5.9, the last 0.005 (spec 2.2)."""
    scene = Scene(lengths=(200,), sharp=0.0)
    score, bound = (x[0, 0] for x in (H2O().score(scene.seen), scene.bound(H2O().score)))
    hold(score[0], sum(1 / t for t in range(1, 201)), bound[0])
    assert round(float(score[0]), 1) == 5.9
    hold(score[-1], 0.005, bound[-1])
