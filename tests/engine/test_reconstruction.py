"""What a repetition of the prompt leaves behind in a cache, and what it needs."""

import copy

import pytest
import torch

from ag.engine.block_pool import Pool, PoolFullError
from ag.engine.cache import EvictionCache
from ag.errors import UserError
from tests.support.refused import refuses

OPTIONS = {"chunk": 11, "overlap": 3, "sinks": 2, "ask": "7 8 9", "ask_part": "5 6", "answer": "11"}
ROW = torch.randint(12, 128, (1, 30), generator=torch.Generator().manual_seed(3))


def read(model, ids, *policy, **options):
    """A cache that has read rows ``[T]`` or ``[B, T]``."""
    cache = EvictionCache(model, *policy, **options)
    model(ids if ids.dim() == 2 else ids[None], past_key_values=cache)
    return cache


def kept(cache):
    """The places of the tokens that are held, by layer, sequence and head."""
    return [[[head.tolist() for head in heads] for heads in cache.kept_positions(i)] for i in range(cache.num_layers)]


@torch.no_grad()
def test_the_prompt_is_evicted_then_and_cannot_be_cropped(tiny_llama):
    model = tiny_llama()
    cache = read(model, ROW, "kvzip", 12, **OPTIONS)
    assert cache.sequences.evicted_at.tolist() == [30] and cache.sequences.num_held.tolist() == [12]
    assert all(not records for records in cache.store.records)
    model(ROW[:, :3], past_key_values=cache)
    cache.crop(-3)
    assert cache.sequences.num_held.tolist() == [12]
    with refuses(UserError, "30", "evicted"):
        cache.crop(-1)


@torch.no_grad()
def test_a_repetition_takes_room_in_one_layer_at_a_time(tiny_llama):
    """A pool for the prompt (2 blocks a row) and one layer's repetition (1 more of each) is enough; a smaller one is
    refused, and the cache is empty then."""
    model = tiny_llama()
    roomy = EvictionCache(model, "full").pool
    sizes = {blocks: blocks * roomy.block_nbytes() for blocks in (14, 13)}
    alone = read(model, ROW, "kvzip", 0.4, **OPTIONS)
    cache = read(model, ROW, "kvzip", 0.4, pool=Pool(model, sizes[14]), **OPTIONS)
    assert kept(cache) == kept(alone)
    tight = EvictionCache(model, "kvzip", 0.4, pool=Pool(model, sizes[13]), **OPTIONS)
    with pytest.raises(PoolFullError):
        model(ROW, past_key_values=tight)
    assert not tight.seen_tokens and tight.pool.num_used == 0


@torch.no_grad()
def test_sequences_change_places_while_the_prompt_is_read(tiny_llama):
    """Each is repeated as what it is: after a selection, and in a fork, whose prompt ends otherwise."""
    model = tiny_llama()
    rows = torch.stack([ROW[0], ROW[0].flip(0)])
    alone = [kept(read(model, row, "kvzip", 0.4, **OPTIONS)) for row in rows]
    cache = EvictionCache(model, "kvzip", 0.4, **OPTIONS)
    cache.expect(torch.ones(2, 30, dtype=torch.bool))
    model(rows[:, :20], past_key_values=cache)
    fork = copy.deepcopy(cache)
    cache.batch_select_indices(torch.tensor([1, 0]))
    model(rows[[1, 0], 20:], past_key_values=cache)
    other = rows.clone()
    other[:, 20:] = 40
    model(other[:, 20:], past_key_values=fork)
    assert [[layer[b] for layer in kept(cache)] for b in (1, 0)] == [[layer[0] for layer in held] for held in alone]
    assert kept(fork) == kept(read(model, other, "kvzip", 0.4, **OPTIONS))


@torch.no_grad()
def test_what_follows_a_prompt_in_its_pass_is_refused(tiny_llama):
    model = tiny_llama()
    cache = EvictionCache(model, "kvzip", 0.4, **OPTIONS)
    cache.expect(torch.ones(1, 26, dtype=torch.bool))
    with refuses(UserError, "30", "26", "before anything follows it"):
        model(ROW, past_key_values=cache)


@torch.no_grad()
def test_a_repetition_beyond_the_context_is_not_squeezed(tiny_llama):
    model = tiny_llama(max_position_embeddings=40)
    cache = EvictionCache(model, "kvzip", 0.4, positions="interpolated", **OPTIONS)
    with refuses(UserError, "context of 40 tokens", "prompt of 30 tokens", "repetition of up to 17"):
        model(ROW, past_key_values=cache)
