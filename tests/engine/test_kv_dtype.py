"""Caches that hold keys and values in codes: what queries see of each token, and what such a cache can do."""

import copy
import importlib

import pytest
import torch

import ag
from ag.engine.block_pool import BLOCK, BlockPool, Pool
from ag.errors import UserError
from ag.kernels.codes import Format
from ag.kernels.pages import gathered, read
from tests.support.batches import padded, row, step
from tests.support.gates_for import gates_for
from tests.support.refused import refuses


@pytest.fixture
def seen(monkeypatch):
    """What each attention over pages read: a list of {(row, rank): key and value}."""
    calls = []

    def watched(attend):
        def watching(q, pages, *others, **options):
            index, there = gathered(pages.table, pages.lengths, BLOCK)
            keys, values = read(pages, index)
            ranks = pages.ranks.flatten()[index]
            calls.append(
                {(r, int(ranks[r, t])): (keys[r, t], values[r, t]) for r, t in there.nonzero().tolist()},
            )
            return attend(q, pages, *others, **options)

        return watching

    module = importlib.import_module("ag.engine.layer")
    monkeypatch.setattr(module, "paged_attention", watched(module.paged_attention))
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_what_queries_see(tiny_llama, seen, side):
    """Of every token what its codes stand for, those of the pass too."""
    model = tiny_llama(num_hidden_layers=1)  # whose keys and values depend on nothing that is held
    batch = padded([row(40), row(33)], side)
    plain, cache = ag.EvictionCache(model, "full"), ag.EvictionCache(model, "full", kv_dtype="int8")
    mask = batch["attention_mask"]
    for each in (plain, cache):
        step(model, each, batch["input_ids"], mask)
    generator = torch.Generator().manual_seed(0)
    for count in (7, 1, 1, 20, 1):
        ids = torch.randint(3, 128, (2, count), generator=generator)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        seen.clear()
        for each in (plain, cache):
            step(model, each, ids, mask)
        came, got = seen
        assert came.keys() == got.keys() and len(came) == 2 * int(mask.sum())
        made = Format.of("int8", *next(iter(came.values())))
        for (r, rank), pair in came.items():
            for codes, x, y in zip(made, pair, got[r, rank], strict=True):
                assert torch.equal(codes.decode(codes.encode(x)[None])[0], y)


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


def test_bytes_of_a_head_of_64():
    """Of a block of 16 tokens: codes, scales and ranks, of what float32 takes."""
    x = torch.empty(0, 64)
    plain, coded = (BlockPool(x, x, kind, nbytes=2**20).block_nbytes() for kind in ("float", "int8"))
    assert plain == BLOCK * (2 * 64 * 4 + 4)
    assert coded == BLOCK * (2 * (64 + 4) + 4) <= 0.28 * plain


@torch.no_grad()
def test_flags_and_windows(tiny_llama, tiny_mistral):
    """A token that comes takes the place of the one that no query sees, in codes too."""
    model = tiny_llama()
    ag.attach(model, gates_for(model, covers="all", recent_tokens=5))
    windowed = tiny_mistral(sliding_window=10)
    for llm, policy in ((model, "gates"), (windowed, "full")):
        caches = [ag.EvictionCache(llm, policy, kv_dtype=x) for x in ("float", "int8")]
        for cache in caches:
            llm(row(30)[None], past_key_values=cache)
            for token in row(20, 1):
                llm(token.view(1, 1), past_key_values=cache)
        plain, coded = caches
        if policy == "full":  # what goes does not depend on what tokens say
            assert [x.tolist() for x in plain.kept_positions(0)[0]] == [x.tolist() for x in coded.kept_positions(0)[0]]
        assert all(len(x) < 50 for x in coded.kept_positions(1)[0])
