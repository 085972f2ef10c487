"""CriticalKV: what heads and layers get is decided by the base score, of any sign; against lists."""

import pytest
import torch

from ag.engine.scorers.controls import KNorm
from ag.engine.scorers.gates import Gates
from ag.engine.scorers.snapkv import SnapKV
from ag.engine.wrappers.criticalkv import CriticalKV
from tests.support.attention_by_hand import Scene, agree, group_mean
from tests.support.batches import columns, read

PROMPT, PASSES, BUDGET = 26, [1, 1, 3, 1, 1], 9


# ---- two scores


def sizes(scene, b, g):
    """Mean over the group of the sum of absolute entries that each value writes, a list."""
    heads = [scene.values(b, g) @ scene.output[h].double() for h in scene.query_heads(g)]
    return group_mean([x.abs().sum(-1).tolist() for x in heads])


@pytest.mark.parametrize("base", [SnapKV(window=3, kernel=3), KNorm(), Gates()], ids=lambda x: type(x).__name__)
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


# ---- whole caches


@pytest.mark.parametrize(
    ("base", "allocator"), [("knorm", "heads"), ("keydiff", "global"), ("expected_attention", "preference")]
)
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
