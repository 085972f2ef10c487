"""What holds for any policy: a sequence in a batch is as it is alone, whatever the mask, the chunks and the turns."""

import copy
import random

import pytest
import torch

import ag
from ag.engine.block_pool import BlockPool, Pool, PoolFullError
from ag.engine.cache import EvictionCache
from ag.errors import UserError
from tests.support.gates_for import gates_for
from tests.support.tiny import pair

POLICIES = [
    ("full", None, {}), ("streaming_llm", 10, {"sinks": 2}), ("h2o", 0.4, {}), ("tova", 9, {}),
    ("snapkv", 10, {"window": 4}), ("snapkv@heads", 10, {"window": 4}), ("h2o@global", 0.5, {}),
    ("cake", 10, {"window": 4}), ("h2o+caote@pyramid", 11, {}), ("scissorhands+vatp", 12, {"recent": 3, "sinks": 1}),
    ("keydiff", 9, {}), ("gates@heads", 10, {}), ("flags", None, {}),
]  # fmt: skip
SCHEDULES = ["prefill", "every", "steps:4", "blocks:7+every"]
CASES = [(*x, schedule) for x in POLICIES for schedule in (SCHEDULES if x[1] else SCHEDULES[:1])]


@pytest.fixture(scope="module")
def model():
    return pair()[0]


def texts(draw, batch):
    """Draw for each sequence the lengths of its turns, single tokens among them."""
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    turns = [[draw.randint(6, 30) for _ in range(batch)]]
    for _ in range(draw.randint(2, 5)):
        turns.append([1] * batch if draw.random() < 0.6 else [draw.randint(0, 5) for _ in range(batch)])
    return [[torch.randint(3, 128, (n,), generator=generator) for n in turn] for turn in turns]


def laid_out(draw, turn):
    """Lay a turn's tokens out in columns with padding anywhere; returns ids and mask ``[B, T]``."""
    width = max(1, *map(len, turn)) + (draw.randint(0, 4) if max(len(x) for x in turn) > 1 else 0)
    ids, mask = torch.zeros(len(turn), width, dtype=torch.long), torch.zeros(len(turn), width, dtype=torch.long)
    for row, tokens in enumerate(turn):
        columns = sorted(draw.sample(range(width), len(tokens)))
        ids[row, columns], mask[row, columns] = tokens, 1
    return ids, mask


def fed(model, cache, ids, mask, before):
    """Read a turn, its positions being places in the own text; returns the logits ``[B, T, V]``."""
    whole = mask if before is None else torch.cat([before, mask], 1)
    positions = (whole.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=whole, position_ids=positions, past_key_values=cache).logits, whole


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("policy", "budget", "options", "schedule"), CASES, ids=[f"{x[0]}-{x[3]}" for x in CASES])
@torch.no_grad()
def test_a_sequence_in_a_batch_is_as_alone(model, policy, budget, options, schedule, seed):
    draw = random.Random(f"{policy} {schedule} {seed}")
    ag.attach(model, gates_for(model, scope="causal", covers="all", sink_tokens=1, recent_tokens=5))
    try:
        turns = texts(draw, draw.randint(2, 4))
        cache = EvictionCache(model, policy, budget, schedule, **options)
        alone = [EvictionCache(model, policy, budget, schedule, **options) for _ in turns[0]]
        before = None
        for turn in turns:
            ids, mask = laid_out(draw, turn)
            logits, before = fed(model, cache, ids, mask, before)
            for row, tokens in enumerate(turn):
                if not len(tokens):
                    continue
                one = alone[row]
                place = torch.arange(one.get_seq_length(), one.get_seq_length() + len(tokens))[None]
                want = model(tokens[None], position_ids=place, past_key_values=one).logits[0]
                torch.testing.assert_close(logits[row][mask[row].bool()], want, atol=2e-4, rtol=0)
                for layer in range(3):
                    for x, y in zip(cache.kept_positions(layer)[row], one.kept_positions(layer)[0], strict=True):
                        if policy == "flags":  # what no later query sees leaves memory lazily
                            x, y = (n[n >= int(one.sequences.num_tokens) - 5] for n in (x, y))
                        assert x.tolist() == y.tolist()
    finally:
        ag.detach(model)


@torch.no_grad()
def test_a_mask_whose_past_changed_is_refused(model):
    cache, ids = EvictionCache(model, "full"), torch.randint(3, 128, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    fed(model, cache, ids, mask, None)
    held = cache.kept_positions(0)
    changed = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    changed[1, 4] = 0
    with pytest.raises(UserError, match="column 4 of sequence 1 came as a token"):
        model(ids[:, :1], attention_mask=changed, past_key_values=cache)
    assert [[x.tolist() for x in y] for y in cache.kept_positions(0)] == [[x.tolist() for x in y] for y in held]
    fed(model, cache, ids[:, :1], mask[:, :1], mask)  # and it goes on


@pytest.mark.parametrize("layer", range(3))
@torch.no_grad()
def test_a_pass_that_is_broken_off_is_noticed(model, layer):
    cache, ids = EvictionCache(model, "h2o", 10), torch.randint(3, 128, (1, 20))

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[layer].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids, past_key_values=cache)
    handle.remove()
    with pytest.raises(UserError, match="broken off"):
        model(ids[:, :1], past_key_values=cache)
    cache.reset()
    want = EvictionCache(model, "h2o", 10)
    logits = [model(ids, past_key_values=x).logits for x in (cache, want)]
    assert torch.equal(*logits)


@torch.no_grad()
def test_protected_spans_stay(model):
    ids = torch.randint(3, 128, (2, 30))
    for policy in ("h2o", "snapkv@heads", "streaming_llm", "h2o@global"):
        cache = EvictionCache(model, policy, 12, "every")
        cache.protect([[(3, 6)], [(10, 12), (0, 1)]])
        model(ids, past_key_values=cache)
        for _ in range(5):
            model(ids[:, :1], past_key_values=cache)
        for layer in range(3):
            for row, spans in enumerate(({3, 4, 5}, {10, 11, 0})):
                assert all(spans <= set(x.tolist()) for x in cache.kept_positions(layer)[row])
            if "@" not in policy:
                assert all(len(x) == 12 for row in cache.kept_positions(layer) for x in row)


@torch.no_grad()
def test_a_full_pool_refuses_and_loses_nothing(model):
    token = torch.empty(0, 16)
    pool = Pool(model, 14 * BlockPool(token, token).block_nbytes())  # 3 layers of 2 heads have 2 blocks each
    cache, ids = EvictionCache(model, "full", pool=pool), torch.randint(3, 128, (1, 60))
    with pytest.raises(PoolFullError, match="a prompt of 60 tokens"):
        model(ids, past_key_values=cache)
    assert pool.num_used == 0
    model(ids[:, :30], past_key_values=cache)
    with pytest.raises(PoolFullError, match="10 tokens of each of 1"):
        model(ids[:, 30:40], past_key_values=cache)
    want = EvictionCache(model, "full")
    model(ids[:, :30], past_key_values=want)
    torch.testing.assert_close(
        *(model(ids[:, 30:32], past_key_values=x).logits for x in (cache, want)), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("blocks", range(12, 26))
@torch.no_grad()
def test_a_fork_that_has_no_room_is_refused_and_goes_on_later(model, blocks):
    """A step of it copies the blocks that it writes into, and an eviction may copy every one that it shares."""
    token = torch.empty(0, 16)
    pool = Pool(model, blocks * BlockPool(token, token).block_nbytes())
    cache, ids = EvictionCache(model, "h2o", 16, "every", pool=pool), torch.randint(3, 128, (1, 30))
    want = EvictionCache(model, "h2o", 16, "every")
    for one in (cache, want):
        model(ids, past_key_values=one)
    fork = copy.deepcopy(cache)
    assert pool.num_used == 12  # 3 layers of 2 heads: a full block, and one for what comes
    if blocks < 24:
        with pytest.raises(PoolFullError, match="1 tokens of each of 1"):
            model(ids[:, :1], past_key_values=fork)
        cache.reset()  # from now on nothing is shared
    else:
        model(ids[:, :1], past_key_values=fork)
        model(ids[:, :1], past_key_values=want)
    assert torch.equal(*(model(ids[:, 1:2], past_key_values=x).logits for x in (fork, want)))


@torch.no_grad()
def test_sequences_come_and_go(model):
    """A cache that others are added to and removed from goes on like each sequence alone; beams share their blocks."""
    draw, alone = random.Random(3), {}
    pool, cache, names = Pool(model, 2**20), None, []
    for number in range(8):
        ids = torch.randint(3, 128, (1, draw.randint(8, 30)))
        new, alone[number] = (EvictionCache(model, "h2o@heads", 9, "every", pool=x) for x in (pool, None))
        for one in (new, alone[number]):
            model(ids, past_key_values=one)
        if cache is None:
            cache = new
        else:
            cache.add(new)
        names.append(number)
        if len(names) > 3:
            gone = draw.randrange(len(names))
            cache.remove([gone])
            del names[gone]
        for _ in range(3):
            tokens = torch.randint(3, 128, (len(names), 1))
            got = model(tokens, past_key_values=cache).logits
            for row, name in enumerate(names):
                want = model(tokens[row : row + 1], past_key_values=alone[name]).logits
                torch.testing.assert_close(got[row : row + 1], want, atol=2e-4, rtol=0)


@torch.no_grad()
def test_crop_goes_back_to_the_last_eviction(model):
    cache, ids = EvictionCache(model, "snapkv", 10, window=4), torch.randint(3, 128, (2, 30))
    model(ids, past_key_values=cache)
    with pytest.raises(UserError, match="were evicted"):
        cache.crop(-1)
    want = [x.tolist() for row in cache.kept_positions(1) for x in row]
    after = model(ids[:, :1], past_key_values=cache).logits
    model(ids[:, 1:6], past_key_values=cache)
    cache.crop([6, 6])
    assert [x.tolist() for row in cache.kept_positions(1) for x in row] == want
    torch.testing.assert_close(model(ids[:, :1], past_key_values=cache).logits, after, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_dense_prompt_is_the_same_in_chunks(model):
    """Queries of a prompt that is read densely see what is not flagged, however long it is and in whatever chunks."""
    ag.attach(model, gates_for(model, scope="causal", covers="all", sink_tokens=1, recent_tokens=5, prefill="dense"))
    try:
        ids = torch.randint(3, 128, (1, 100), generator=torch.Generator().manual_seed(0))
        whole, chunks = (EvictionCache(model, "flags", None, schedule) for schedule in ("prefill", "blocks:8"))
        torch.testing.assert_close(*(model(ids, past_key_values=x).logits for x in (whole, chunks)), atol=2e-4, rtol=0)
        for layer in range(3):
            held = [cache.kept_positions(layer)[0] for cache in (whole, chunks)]
            assert [x.tolist() for x in held[0]] == [x.tolist() for x in held[1]]
            assert all(len(x) < 100 for x in held[0])
    finally:
        ag.detach(model)
