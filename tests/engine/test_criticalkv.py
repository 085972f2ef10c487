"""CriticalKV: what heads and layers get is decided by the base score, of any sign; against lists."""

from dataclasses import replace

import pytest
import torch

from ag.engine.allocators.base import Candidates
from ag.engine.allocators.heads import Heads
from ag.engine.scorers.controls import KNorm
from ag.engine.scorers.gates import Gates
from ag.engine.scorers.h2o import H2O
from ag.engine.scorers.snapkv import SnapKV
from ag.engine.select import filling_order
from ag.engine.wrappers.criticalkv import CriticalKV
from tests.support.attention_by_hand import Scene, agree, group_mean
from tests.support.batches import columns, read
from tests.support.candidates import two_stages

PROMPT, PASSES, BUDGET = 26, [1, 1, 3, 1, 1], 9


# ---- two scores


def sizes(scene, b, g):
    """Mean over the group of the sum of absolute entries that each value writes, a list."""
    heads = [scene.values(b, g) @ scene.output[h].double() for h in scene.query_heads(g)]
    return group_mean([x.abs().sum(-1).tolist() for x in heads])


@pytest.mark.parametrize("base", [H2O(), SnapKV(window=3, kernel=3), KNorm(), Gates()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("shape", [{"lengths": (11, 5, 1), "heads": 6}, {"lengths": (15, 6), "ragged": True}])
def test_criticalkv_is_the_base_score_and_its_product(shape, base):
    scene = Scene(seed=21, gate=True, **shape)
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


def two_scores(seed=0, heads=3, n=20, capacity=9):
    make = torch.Generator().manual_seed(seed)
    score, second = torch.rand(2, 1, heads, n, generator=make)
    protected = torch.zeros(1, heads, n, dtype=torch.bool)
    protected[..., -2:] = True
    numbers = torch.tensor([capacity]), torch.tensor([n]), torch.tensor([True])
    return Candidates(score, protected, torch.ones_like(protected), *numbers, second=second, first_share=0.5)


@pytest.mark.parametrize("first", [0.0, 0.3, 0.5, 1.0])
def test_the_second_score_fills_what_the_first_leaves(first):
    candidates = replace(two_scores(), first_share=first)
    keep = candidates.keep(torch.tensor([9]))
    for h in range(3):
        parts = candidates.score[0, h].tolist(), candidates.second[0, h].tolist(), candidates.protected[0, h].tolist()
        assert keep[0, h].nonzero().flatten().tolist() == two_stages(*parts, 9, first)
    if first == 1:
        assert torch.equal(keep, replace(candidates, second=None).keep(torch.tensor([9])))


def test_less_and_less_of_two_scores_is_one_decision():
    """What a smaller share keeps is among what a larger one keeps, also when the candidates was cut in between."""
    for seed in range(30):
        candidates = two_scores(seed, n=30)
        columns, left = torch.arange(30).expand(1, 3, 30), candidates
        for share in (25, 17, 16, 9, 5, 3):
            keep = left.keep(torch.tensor([share]))
            kept = [sorted(columns[0, h][keep[0, h]].tolist()) for h in range(3)]
            columns, left = columns.gather(-1, filling_order(keep)), left.after(keep)
            whole = candidates.keep(torch.tensor([share]))
            assert kept == [whole[0, h].nonzero().flatten().tolist() for h in range(3)]


def test_heads_share_by_the_first_score_alone():
    candidates = two_scores(capacity=9)
    keep = Heads(floor=0.2).keep_later(0, candidates, None)
    plain = Heads(floor=0.2).keep_later(0, replace(candidates, second=None), None)
    assert keep.sum(-1).tolist() == plain.sum(-1).tolist()
    assert int(keep.sum()) == 27 and not torch.equal(keep, plain)
    for h, count in enumerate(keep[0].sum(-1).tolist()):
        parts = candidates.score[0, h].tolist(), candidates.second[0, h].tolist(), candidates.protected[0, h].tolist()
        assert keep[0, h].nonzero().flatten().tolist() == two_stages(*parts, count, 0.5)


# ---- whole caches


@pytest.mark.parametrize("allocator", ["heads", "global", "pyramid", "preference"])
@pytest.mark.parametrize("base", ["knorm", "keydiff", "expected_attention"])
def test_heads_and_layers_get_what_the_base_gives_them(tiny_mistral, base, allocator):
    """Three KV heads a layer whose scores lie at different heights below 0: a shift of each would level them."""
    model = tiny_mistral(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, sliding_window=None)
    ids, values = torch.randint(3, 128, (1, 200), generator=torch.Generator().manual_seed(0)), {}
    if base == "expected_attention":
        values = {"values": False}  # as under a wrapper, which weighs them itself

    def kept(name, **options):
        return [layer[0] for layer in columns(read(model, ids, f"{name}@{allocator}", 47, **options))]

    def counts(held):
        return [[len(head) for head in layer] for layer in held]

    plain = kept(base, **values)
    assert len({count for layer in counts(plain) for count in layer}) > 1
    for first in (0.0, 0.5, 1.0):
        found = kept(f"{base}+criticalkv", first=first)
        assert counts(found) == counts(plain)
        assert (found == plain) == (first == 1)
