"""Every scorer and its options against its formula in plain loops (``attention_by_hand``)."""

from dataclasses import dataclass, replace
from math import exp

import pytest
import torch
from torch.nn import functional as F

import ag
from ag import retention
from ag.engine.allocators.base import Candidates, topk_over_heads
from ag.engine.attention_rows import moments_over_queries
from ag.engine.evictor import NonFiniteScoreError
from ag.engine.records import latest
from ag.engine.scorers import SCORERS, Needs, RowScorer, Scorer
from ag.engine.scorers.cake import Cake
from ag.engine.scorers.controls import KNorm, Random
from ag.engine.scorers.gates import Gates
from ag.engine.scorers.h2o import H2O
from ag.engine.scorers.keydiff import KeyDiff
from ag.engine.scorers.rkv import RKV
from ag.engine.scorers.scissorhands import Scissorhands
from ag.engine.scorers.snapkv import SnapKV
from ag.engine.scorers.streaming_llm import StreamingLLM
from ag.engine.scorers.tova import Tova
from ag.engine.wrappers.caote import Caote
from ag.errors import UserError
from tests.support.attention_by_hand import (
    SINKS_AND_CAP,
    Scene,
    agree,
    by_group,
    inputs_of,
    pool,
    pooled_before,
    within,
)
from tests.support.batches import columns
from tests.support.bounds import conditioned, hold
from tests.support.refused import refuses

EPS = torch.finfo(torch.float32).eps
SCENES = {
    "one": {"lengths": (12,)},
    "left": {"lengths": (13, 6, 1), "padding": "left", "heads": 2, "kv_heads": 2},
    "ragged": {"lengths": (16, 7), "ragged": True},
    "sharp": {"lengths": (12,), "sharp": 8.0, "heads": 6},
    "sinks-and-cap": {"lengths": (10, 4), "ragged": True, "softmax": SINKS_AND_CAP},
}


@pytest.fixture(params=SCENES, ids=str)
def scene(request):
    return Scene(seed=11, **SCENES[request.param])


def scored(scorer, scene):
    return scorer.score(scene.inputs(scorer))


def protected_tokens(scene, scorer, capacity):
    limits, reader = scorer.limits(torch.tensor(capacity)), scene.reader
    mask = retention.protected_mask(reader.key_indices, reader.lengths, *limits)
    return {(b, g): [p for i, p in enumerate(scene.held[b][g]) if mask[b, g, i]] for b, g in scene.places()}


def newest(scene, count, first=0):
    return {
        (b, g): [p for p in scene.held[b][g] if p < first or p >= scene.lengths[b] - count] for b, g in scene.places()
    }


def test_streaming_llm(scene):
    scorer = StreamingLLM(sinks=2)
    agree(scene, scorer, {x: [float(p) for p in scene.held[x[0]][x[1]]] for x in scene.places()})
    assert protected_tokens(scene, scorer, [8] * len(scene.lengths)) == newest(scene, 0, first=2)


@pytest.mark.parametrize("window", [None, 4])
def test_h2o_sums_what_queries_pay(scene, window):
    wanted = by_group(scene, lambda b, h: scene.column_sums(b, h, window))
    agree(scene, H2O(window=window), wanted)
    if window is not None:
        assert torch.equal(scored(H2O(window=window), scene), scored(Scissorhands(window=window), scene))


def test_shares_of_a_budget_are_exact():
    """21 % of 300 are 63; a product in float32 is a little less."""
    capacity = torch.tensor([300, 450])
    assert H2O(recent=0.21).limits(capacity)[1].tolist() == [63, 94]
    assert Gates(recent_share=0.21).limits(capacity)[1].tolist() == [63, 94]
    layer = Candidates(torch.linspace(1, 0, 500).repeat(1, 2, 1), *(torch.tensor([x]) for x in (300, 500, True)))
    layer.score[:, 1] *= 1e-3
    (kept,) = topk_over_heads([layer], 0.21, torch.tensor([300]))
    assert kept.sum(-1).tolist() == [[237, 63]]
    layer.second, layer.first_share = layer.score.flip(-1), 0.21
    assert layer.keep(layer.capacity)[0, 0].nonzero().flatten().tolist() == [*range(63), *range(263, 500)]


@pytest.mark.parametrize(("recent", "counts"), [(0.5, [3, 4, 0]), (3, [3, 3, 3])])
def test_h2o_protects_a_share_of_the_budget(recent, counts):
    scene = Scene(lengths=(13, 9, 5), ragged=True)
    got = protected_tokens(scene, H2O(recent=recent, sinks=1), [7, 8, 1])  # floor(7 / 2) = 3
    assert got == {
        (b, g): [p for p in scene.held[b][g] if p < 1 or p >= scene.lengths[b] - counts[b]] for b, g in scene.places()
    }


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
    agree(scene, Tova(), expected)


def test_tova_by_kv_head(scene):
    agree(scene, Tova(scope="kv_head"), by_group(scene, lambda b, h: scene.column_sums(b, h, 1)))


@pytest.mark.parametrize(("window", "kernel", "kind"), [(3, 5, "max"), (2, 7, "avg"), (1, 1, "max")])
def test_snapkv_pools_the_prefix_only(scene, window, kernel, kind):
    scorer = SnapKV(window=window, kernel=kernel, pooling=kind)
    sums = by_group(scene, lambda b, h: scene.column_sums(b, h, window))
    agree(scene, scorer, pooled_before(scene, sums, window, kernel, kind), skip=within(scene, window))
    assert protected_tokens(scene, scorer, [9] * len(scene.lengths)) == newest(scene, window)


@pytest.mark.parametrize(("window", "gamma"), [(1, 200.0), (5, 1.0), (5, 200.0)])
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

    wanted = pooled_before(scene, by_group(scene, indicator), window, 5, "avg")
    agree(scene, Cake(window=window, gamma=gamma), wanted, skip=within(scene, window))


@pytest.mark.parametrize("size", [0.0, 0.1, 8.0])
def test_cakes_variance_agrees_with_float64(size):
    """A mean of squares less a squared mean would lose what the indicator is about; the weights are given."""
    logits = size * torch.randn(1, 1, 32, 130, generator=torch.Generator().manual_seed(0))
    rows = logits.softmax(-1)
    weights, (_, variances) = rows[0].double(), moments_over_queries(rows, torch.ones(1, 32, dtype=torch.bool))

    def variance(weights):
        return (weights - weights.mean(1, keepdim=True)).square().sum(1) / 31

    want = variance(weights)
    # equal terms round alike in a sum, and a square below the normal numbers is off by a step of those
    sums = 32 * EPS * (want + torch.finfo(torch.float32).smallest_normal)
    hold(variances[0], want, conditioned(variance, weights) + sums)


def unit(vector):
    length = sum(float(x) ** 2 for x in vector) ** 0.5
    return [float(x) / length for x in vector]


def test_keydiff_is_the_cosine_to_the_mean_direction(scene):
    expected = {}
    for b, g in scene.places():
        keys = [unit(scene.k[b, g, i]) for i in range(len(scene.held[b][g]))]
        mean = unit([sum(x) / len(keys) for x in zip(*keys, strict=True)])
        expected[b, g] = [-sum(x * y for x, y in zip(key, mean, strict=True)) for key in keys]
    agree(scene, KeyDiff(), expected)


def softmax(values):
    top = max(values)
    weights = [exp(value - top) for value in values]
    return [weight / sum(weights) for weight in weights]


def redundancy(scene, b, g, threshold):
    """R-KV's, key by key: which keys are alike to others, but for the newest that is alike to each."""
    keys = [unit(scene.k[b, g, i]) for i in range(len(scene.held[b][g]))]
    alike = [0.0] * len(keys)
    for j, mine in enumerate(keys):
        cosine = {i: sum(x * y for x, y in zip(mine, other, strict=True)) for i, other in enumerate(keys) if i != j}
        similar = [i for i in cosine if cosine[i] > threshold]  # slots of a scene are in the order of the text
        cosine.pop(max(similar, default=None), None)
        for i, value in cosine.items():
            alike[i] += value
    return softmax([total / len(keys) for total in alike])


def importance(scene, b, g, window, kernel):
    """R-KV's: the mean of the window's softmaxes over the tokens before it, of the group's largest logits, pooled."""
    before = [i for i, p in enumerate(scene.held[b][g]) if p < scene.lengths[b] - window]
    rows = [scene.dense(b, h)[1][-window:] for h in scene.query_heads(g)]
    weights = [softmax([max(float(s[w, i]) for s in rows) for i in before]) for w in range(len(rows[0])) if before]
    mean = [sum(column) / len(column) for column in zip(*weights, strict=True)]
    return pool(mean, kernel, "max") + [0.0] * (len(scene.held[b][g]) - len(before))


@pytest.mark.parametrize(("window", "kernel", "mix", "threshold"), [(3, 5, 0.1, 0.5), (1, 1, 0.6, 0.1)])
def test_rkv_is_importance_less_redundancy(scene, window, kernel, mix, threshold):
    scorer = RKV(window=window, kernel=kernel, mix=mix, threshold=threshold)
    wanted = {
        (b, g): [
            mix * i - (1 - mix) * r
            for i, r in zip(importance(scene, b, g, window, kernel), redundancy(scene, b, g, threshold), strict=True)
        ]
        for b, g in scene.places()
    }
    agree(scene, scorer, wanted, skip=within(scene, window) if mix else lambda b, g, p: False)
    assert protected_tokens(scene, scorer, [9] * len(scene.lengths)) == newest(scene, window)


def test_knorm(scene):
    expected = {
        (b, g): [-(sum(float(x) ** 2 for x in scene.k[b, g, i]) ** 0.5) for i in range(len(scene.held[b][g]))]
        for b, g in scene.places()
    }
    agree(scene, KNorm(), expected)


def test_gates_are_the_logit_and_weigh_by_the_probability():
    scene = Scene(lengths=(9, 4), gate=True)
    inputs, valid = scene.inputs(Gates()), scene.reader.key_valid
    assert torch.equal(Gates().score(inputs)[valid], scene.gate[valid])
    assert torch.equal(Gates().weight(inputs, scene.gate), scene.gate.sigmoid())
    assert protected_tokens(scene, Gates(sinks=1, recent=2), [4, 4]) == newest(scene, 2, first=1)


def test_random_depends_on_seed_layer_head_and_place_only():
    one, padded = Scene(lengths=(9,)), Scene(lengths=(30, 9), seed=2, padding="right", ragged=True)
    score, again = scored(Random(), one), scored(Random(), padded)
    for g in range(2):
        for slot, p in enumerate(padded.held[1][g]):
            assert float(again[1, g, slot]) == float(score[0, g, p])
    seeds = [scored(Random(seed=seed), one) for seed in (1, 20261129)]
    different = [*seeds, scored(Random(), Scene(lengths=(9,), layer=1)), score.flip(1)]
    for other in different:
        assert not torch.eq(other, score).any()


@pytest.mark.parametrize("name", SCORERS)
def test_scores_by_query_head_are_not_negative_and_cover_every_token(name):
    """What CAOTE normalises: no window cut out, nothing below 0, the pooling over all held tokens."""
    scene = Scene(seed=9, lengths=(14, 5), ragged=True, gate=True)
    scorer = SCORERS[name]()
    inputs = inputs_of(Caote(inner=scorer), scene.reader)
    heads = scorer.heads(inputs)
    assert heads.shape == (2, 4, scene.k.shape[2])
    assert float(heads.min()) >= 0
    if isinstance(scorer, SnapKV):
        for b, g in scene.places():
            for h in scene.query_heads(g):
                raw = scorer.sums(inputs)[b, h, : len(scene.held[b][g])].tolist()
                wanted = torch.tensor(pool(raw, scorer.kernel, scorer.pooling), dtype=torch.float64)
                hold(heads[b, h, : len(raw)], wanted, 2 * (scorer.kernel + 1) * EPS * wanted)  # a mean of so many
    elif isinstance(scorer, RowScorer):
        assert torch.equal(heads, scorer.sums(inputs))
    else:  # shifted if some are below 0, so that the least becomes 0
        score = scorer.score(inputs)
        score = score.sigmoid() if isinstance(scorer, Gates) else score
        for b, g in scene.places():
            mine = score[b, g, : len(scene.held[b][g])]
            for h in scene.query_heads(g):
                assert torch.equal(heads[b, h, : len(mine)], mine - mine.min().clamp_max(0))


@dataclass(frozen=True, kw_only=True)
class Whole(KNorm):
    """Scores by whole numbers."""

    def score(self, inputs):
        return super().score(inputs).long()


@torch.no_grad()
@pytest.mark.parametrize("allocator", ["uniform", "heads"])
def test_a_score_of_whole_numbers_is_refused(tiny_llama, allocator):
    model = tiny_llama()
    policy = replace(ag.policy(f"knorm@{allocator}", 12), scorer=Whole())
    with refuses(UserError, "Whole.score", "torch.int64 [1, 2, 30]", "layer 0", "torch.float32"):
        model(torch.arange(3, 33)[None], past_key_values=ag.EvictionCache(model, policy))


@dataclass(frozen=True, kw_only=True)
class LatestRows(Scorer):
    """Sums the newest four rows of attention, of which there are fewer at first."""

    needs = Needs(attention_rows=4, only_new=True)

    def note(self, inputs, records):
        rows, query_valid = inputs.attention_rows
        latest(records, "rows", query_valid[:, None, :, None] * rows, query_valid, 4)

    def score(self, inputs):
        return inputs.records["rows"].sum(2).unflatten(1, (-1, inputs.group)).mean(2)


@torch.no_grad()
def test_records_grow_in_a_batch(tiny_llama):
    """Its sequences reach the budget at different steps."""
    model, policy = tiny_llama(), replace(ag.policy("knorm", 3, "steps:2"), scorer=LatestRows())
    texts = [torch.arange(3, 11), torch.arange(4, 11)]

    def held(texts):
        cache, widest = ag.EvictionCache(model, policy), max(map(len, texts))
        ids = torch.stack([F.pad(text, (widest - len(text), 0)) for text in texts])
        mask = (torch.arange(widest) >= torch.tensor([[widest - len(text)] for text in texts])).long()
        for end in range(widest - 6, widest + 1):  # prompts of 2 tokens and of 1
            new = slice(0 if end == widest - 6 else end - 1, end)
            positions = (mask[:, :end].cumsum(1) - 1).clamp_min(0)[:, new]
            model(ids[:, new], attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache)
        return columns(cache)

    alone = [held([text]) for text in texts]
    assert held(texts) == [[one[layer][0] for one in alone] for layer in range(3)]


@dataclass(frozen=True, kw_only=True)
class NoSecond(KNorm):
    """Its second score is not a number."""

    def second(self, inputs, score):
        return torch.full_like(score, float("nan")), 0.5


@torch.no_grad()
def test_a_second_score_that_is_not_finite_is_refused(tiny_llama):
    model, policy = tiny_llama(), replace(ag.policy("knorm", 8), scorer=NoSecond())
    with refuses(NonFiniteScoreError, "NoSecond", "finite"):
        model(torch.arange(3, 43)[None], past_key_values=ag.EvictionCache(model, policy))


@dataclass(frozen=True, kw_only=True)
class Recorder(KNorm):
    """Records the attention of the new queries in a type and a form."""

    dtype: torch.dtype = torch.float32
    by_head: bool = True
    needs = Needs(keys=True, attention_sums="new", every_query=("attention_sums",))

    def note(self, inputs, records):
        sums = inputs.attention_sums if self.by_head else inputs.attention_sums.sum(1)
        records["sums"] = sums.to(self.dtype)


@pytest.mark.parametrize(
    ("form", "told"), [({"dtype": torch.bfloat16}, "bfloat16"), ({"by_head": False}, "[2, 40]"), ({}, None)]
)
@torch.no_grad()
def test_records_that_kernels_cannot_move_are_refused(tiny_llama, form, told):
    model, policy = tiny_llama(), replace(ag.policy("knorm", 8, "every"), scorer=Recorder(**form))
    cache, ids = ag.EvictionCache(model, policy), torch.arange(3, 43).repeat(2, 1)
    if told is None:
        model(ids, past_key_values=cache)
        assert len(cache.kept_positions(0)[1][0]) == 8
        return
    with refuses(UserError, "sums", told, "float32", "Hkv=2"):
        model(ids, past_key_values=cache)
