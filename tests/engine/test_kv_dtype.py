"""Caches that hold keys and values in codes: what queries see of each token, and what such a cache can do."""

import copy

import torch

import ag
from ag.engine.block_pool import Pool
from ag.errors import UserError
from tests.support.batches import row
from tests.support.refused import refuses


@torch.no_grad()
def test_drafts_that_are_taken_back(tiny_llama):
    """Codes are those of a cache that never saw them."""
    model, ids = tiny_llama(), row(60)[None]
    never, cache = (ag.EvictionCache(model, "full", kv_dtype="int8") for _ in range(2))
    for each in (never, cache):
        model(ids[:, :40], past_key_values=each)
    model(ids[:, 40:52], past_key_values=cache)
    cache.crop(-12)
    assert cache.store.held.tolist() == never.store.held.tolist()
    for layer in range(3):
        places = [each.store.ledger(layer)[0][..., :40] for each in (cache, never)]
        for column, other in zip(
            *([x.flatten(0, 1) for x in each.pool.columns()] for each in (cache, never)), strict=True
        ):
            assert torch.equal(column[places[0]], other[places[1]])
    again, wanted = (model(ids[:, 52:53], past_key_values=each).logits for each in (cache, never))
    assert torch.equal(again, wanted)


@torch.no_grad()
def test_copies_beams_and_joined_sequences_go_on_alone(tiny_llama):
    model = tiny_llama()
    pool = Pool(model, 2**20, "int8")
    caches = [ag.EvictionCache(model, "tova", 20, "every", pool=pool) for _ in range(2)]
    for number, cache in enumerate(caches):
        model(row(30, number)[None], past_key_values=cache)
    alone = [copy.deepcopy(cache) for cache in caches]
    caches[0].add(caches[1])
    caches[0].batch_select_indices(torch.tensor([1, 0, 1]))
    ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(5))
    for t in range(12):
        together = model(ids[[1, 0, 1], t : t + 1], past_key_values=caches[0]).logits
        each = [model(ids[i : i + 1, t : t + 1], past_key_values=alone[i]).logits for i in range(2)]
        # sums of a batch differ in their last bits, and a code that falls to the other side by a step of a group
        torch.testing.assert_close(together, torch.cat([each[1], each[0], each[1]]), atol=1e-2, rtol=1e-2)
    caches[0].remove([0, 2])
    assert caches[0].kept_positions(0)[0][0].tolist() == alone[0].kept_positions(0)[0][0].tolist()
    del caches, alone, cache
    assert pool.free == pool.capacity


def test_a_policy_holds_what_its_pool_holds(tiny_llama):
    model = tiny_llama()
    pool = Pool(model, 2**20, "int8")
    assert ag.EvictionCache(model, "full", pool=pool).policy == ag.policy("full", kv_dtype="int8")
    assert ag.EvictionCache(model, "full", kv_dtype="int8", pool=pool).policy.kv_dtype == "int8"
    with refuses(UserError, "kv_dtype='int8'", "float", "ag.Pool(model, nbytes, 'int8')"):
        ag.EvictionCache(model, "full", kv_dtype="int8", pool=Pool(model, 2**20))
    with refuses(UserError, "kv_dtype='int4'", "float", "int8"):
        ag.EvictionCache(model, "full", kv_dtype="int4")
    with refuses(UserError, "kv_dtype='half'", "float", "int8"):
        Pool(model, 2**20, "half")
    assert "kv_dtype='int8'" in repr(ag.policy("gates", kv_dtype="int8"))
