"""Layers whose KV heads differ in number and in size: a store for each kind, in blocks of one pool."""

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

import ag
from ag import EvictionCache
from ag.engine.block_pool import BlockPool
from ag.errors import UserError
from ag.kernels.pages import read
from ag.model.geometry import KVHeads
from tests.support import served
from tests.support.batches import padded, positions, row
from tests.support.bounds import hold, of_logits
from tests.support.refused import refuses
from tests.support.unlike import HEADS, unlike_llama

ROWS = row(40, 1), row(31, 2)
POLICIES = {
    "full": ag.policy("full"),
    "h2o": ag.policy("h2o", 0.5, "every"),
    "global": ag.policy("h2o@global", 0.4, "every"),
    "heads in blocks": ag.policy("h2o@heads", 12, "blocks:16+steps:3"),
    "preference": ag.policy("snapkv@preference", 0.5, window=4),
    "int8": ag.policy("knorm@pyramid", 0.5, "every", kv_dtype="int8"),
    "kvzip": ag.policy("kvzip", 0.5),
    "slots": ag.policy("h2o@heads", 0.5, "every", positions="slot"),
}
SLOWER = POLICIES.keys() - {"global", "int8"}


@pytest.fixture(scope="module")
def model():
    return unlike_llama()


def kept(cache):
    layers = range(len(cache.state.layers))
    return [[[head.tolist() for head in heads] for heads in cache.kept_positions(layer)] for layer in layers]


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOWER)) for x in POLICIES])
@torch.no_grad()
def test_a_batch_goes_on_as_each_text_alone(model, name, tmp_path):
    """Padded on the left, selected, saved and loaded; and joined from caches of a pool, of which copies go on."""
    if name == "slots":
        model = unlike_llama([(number, 8) for number, _ in HEADS])  # whose keys one RoPE rotates
    policy, bound, (ids, mask) = POLICIES[name], of_logits(model, *ROWS), padded(ROWS).values()
    pool, alone, joined = ag.Pool(model, 1 << 20, policy.kv_dtype), [], []
    both = EvictionCache(model, policy)
    model(ids, attention_mask=mask, position_ids=positions(mask, 40), past_key_values=both)
    both.batch_select_indices([1, 0, 1])
    both.remove([2])
    for text in reversed(ROWS):
        alone.append(EvictionCache(model, policy, pool=pool))
        model(text[None], past_key_values=alone[-1])
        joined.append(copy.deepcopy(alone[-1]))
    joined[0].add(joined[1])
    both.save(tmp_path / "cache")
    every, mask = [both, EvictionCache.load(tmp_path / "cache", model), joined[0]], mask.flip(0)
    assert every[0].nbytes == every[1].nbytes and str(every[0].report()) == str(every[1].report())
    for token in row(5, 3):
        mask = F.pad(mask, (0, 1), value=1)
        options = {"attention_mask": mask, "position_ids": positions(mask, 1)}
        want = torch.cat([model(token[None, None], past_key_values=x).logits for x in alone])
        for cache in every:
            hold(model(token.expand(2, 1), past_key_values=cache, **options).logits, want, bound)
    one, other = map(kept, alone)
    assert kept(every[0]) == kept(every[1]) == kept(every[2]) == [x + y for x, y in zip(one, other, strict=True)]
    for cache in [*alone, *joined]:
        cache.reset()
    assert pool.free == pool.capacity


@torch.no_grad()
def test_what_is_evicted_is_what_the_attention_does_not_see(model):
    """Under the mask of first and newest tokens, in the model of transformers with its own cache."""
    cache, own = EvictionCache(model, "streaming_llm", 16, sinks=4, recent=12), DynamicCache()
    for one in (cache, own):
        model(ROWS[0][None], past_key_values=one)
    assert kept(cache) == [[[[*range(4), *range(28, 40)]] * number] for number, _ in HEADS]
    seen = torch.tensor(kept(cache)[0][0][0])
    for place, token in enumerate(row(4, 5), 40):
        seen = torch.cat([seen, torch.tensor([place])])
        mask = torch.full((1, 1, 1, place + 1), -torch.inf)
        mask[..., seen] = 0
        want = model(token[None, None], attention_mask=mask, past_key_values=own).logits
        hold(model(token[None, None], past_key_values=cache).logits, want, of_logits(model, ROWS[0]))


@pytest.mark.parametrize("heads", [HEADS, ((1, 8), (4, 16), (2, 16))])  # of which the small ones stay
@torch.no_grad()
def test_all_heads_of_all_layers_compete(heads):
    """Layer by layer what is left of a prompt is what one decision at its end keeps: the shortest keys."""
    model = unlike_llama(heads)
    full, cache = EvictionCache(model, "full"), EvictionCache(model, "knorm@global", 0.3)
    for one in (full, cache):
        model(ROWS[0][None], past_key_values=one)
    lengths = []
    for layer, store in enumerate(full.state.layer_stores):
        places, token_indices = store.ledger(layer)
        assert token_indices.tolist() == [[[*range(40)]] * heads[layer][0]]
        lengths.append(torch.linalg.vector_norm(read(store.pages(layer), places[0])[0], dim=-1))
    count = 12 * sum(number for number, _ in heads)
    bound = torch.cat(lengths).flatten().kthvalue(count).values
    assert kept(cache) == [[[head.nonzero()[:, 0].tolist() for head in x <= bound]] for x in lengths]


@torch.no_grad()
def test_bytes_are_those_of_the_heads(model):
    """Smaller heads have more tokens in a block of as many bytes."""
    cache = EvictionCache(model, "full")
    for part in row(64, 1)[None].split([62, 1, 1], 1):
        model(part, past_key_values=cache)
    assert [store.block_size for store in cache.state.layer_stores] == [16 if size == 16 else 32 for _, size in HEADS]
    token_indices = 4 * (16 + 32)  # of a block
    blocks = [number * 64 // (16 if size == 16 else 32) for number, size in HEADS]
    assert cache.layer_nbytes() == [n * (16 * 16 * 2 * 4 + token_indices) for n in blocks]
    assert cache.nbytes == sum(cache.layer_nbytes())
    assert cache.report().plain_nbytes == sum(64 * number * size * 2 * 4 for number, size in HEADS)


def test_answers_of_a_server_are_those_of_each_request_alone(model, tiny_tokenizer):
    served.answers_of_shared_beginnings(model, tiny_tokenizer, ag.policy("h2o@global", 12), ag.Pool(model, 1 << 18))


def test_what_does_not_fit_is_refused(model):
    with refuses(UserError, "1, 2 and 4 KV heads", "the same number"):
        ag.AttentionGates(model.config, ag.GateConfig())
    with refuses(UserError, "Pool", "kv_heads=[(2, 8, 8), (1, 8, 8)]", "[(1, 8, 8), (2, 8, 8)]"):
        pool = ag.Pool(unlike_llama([(2, 8), (1, 8)]), 1 << 20)
        EvictionCache(unlike_llama([(1, 8), (2, 8)]), "full", pool=pool)
    with refuses(UserError, "(8, 8), (16, 8)", "one ratio"):
        BlockPool([KVHeads(2, 8, 8), KVHeads(2, 16, 8)], torch.empty(0))
