"""Pools of fixed size: what fits, and that nothing happens where it does not."""

import copy
import errno
import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ag
from ag.engine.block_pool import BLOCK, BlockPool, Pool, PoolFullError
from ag.engine.kv_store import KVStore
from ag.errors import UserError
from ag.gates.attach import attached_gates
from ag.model.geometry import KVHeads
from tests.model.test_architectures import tiny
from tests.support.batches import columns, row
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

TOKEN = 16 * 2 * 4 + 4  # bytes of a token of tiny_llama: key, value, token index


def test_as_many_blocks_as_the_bytes_hold(tiny_llama):
    pool = Pool(tiny_llama(), 10 * BLOCK * TOKEN + BLOCK * TOKEN - 1)
    assert (pool.capacity, pool.free) == (10, 10)
    assert (pool.block_nbytes(), pool.nbytes) == (BLOCK * TOKEN, 10 * BLOCK * TOKEN)
    with refuses(UserError, "nbytes=100", str(BLOCK * TOKEN)):
        Pool(tiny_llama(), 100)


def test_a_store_may_go_in_the_midst_of_anything(tiny_llama):
    pool = Pool(tiny_llama(), 20 * BLOCK * TOKEN)
    heads = KVHeads(2, 16, 16)
    store = KVStore(pool, [heads], heads)
    store.start_batch(1)
    store.make_room(slice(None), torch.tensor([40]))
    assert pool.free == 20 - 6
    with FakeTensorMode():
        del store
        gc.collect()
    assert pool.free == 20


def fail(*_, **__):
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("part", ["wider table", "copies"])
def test_without_memory_no_block_is_lost(tiny_llama, monkeypatch, part):
    pool, heads = Pool(tiny_llama(), 40 * BLOCK * TOKEN), KVHeads(2, 16, 16)
    store = KVStore(pool, [heads], heads)
    store.start_batch(1)
    store.make_room(slice(None), torch.tensor([20]))
    if part == "copies":
        other = store.fork()
        monkeypatch.setattr(BlockPool, "columns", fail)
    else:
        other = store
        monkeypatch.setattr(KVStore, "_widen", fail)
    used = pool.num_used
    with pytest.raises(torch.OutOfMemoryError):
        other.make_room(slice(None), torch.tensor([1 if part == "copies" else 300]))
    assert pool.num_used == used


@torch.no_grad()
def test_a_pool_that_has_no_memory_for_all_of_its_columns_keeps_its_size(tiny_llama, monkeypatch):
    monkeypatch.setattr("ag.engine.block_pool.RESERVES", False)
    model = tiny_llama()
    cache, short, longer = ag.EvictionCache(model, "full"), ids(1, 20), ids(2, 60)
    model(short, past_key_values=cache)
    pool, column = cache.setup.pool, BlockPool._column
    size = pool.capacity

    def fails_at_values(self, name, *given):
        return fail() if name == "values" else column(self, name, *given)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(BlockPool, "_column", fails_at_values)
        cache.reset()
        model(ids(4, 60), past_key_values=cache)
    assert pool.capacity == size and max(map(len, pool.columns())) > size
    cache.reset()
    got = model(longer, past_key_values=cache).logits
    hold(got, model(longer, past_key_values=ag.EvictionCache(model, "full")).logits, of_logits(model))


# ---- caches that share a pool


def ids(batch, length, seed=0):
    return torch.stack([row(length, seed + 10 * b) for b in range(batch)])


def pool_of(model, blocks):
    return Pool(model, blocks * BLOCK * TOKEN)


@torch.no_grad()
def test_a_prompt_that_does_not_fit_leaves_an_empty_cache(tiny_llama):
    model = tiny_llama()
    pool = pool_of(model, 20)  # 40 tokens take 3 blocks in 6 rows
    first = ag.EvictionCache(model, "full", pool=pool)
    model(ids(1, 40), past_key_values=first)
    assert pool.free == 2
    ag.attach(model, gates_for(model))
    for policy, options in ((("full",), {}), (("snapkv", 16), {"window": 4}), (("gates",), {})):
        other = ag.EvictionCache(model, *policy, pool=pool, **options)
        with pytest.raises(PoolFullError) as error:
            model(ids(1, 40), past_key_values=other)
        assert error.value.blocks > 2
        assert f"{error.value.blocks * BLOCK * TOKEN} bytes" in str(error.value)
        assert (pool.free, other.seen_tokens, other.nbytes, columns(other)) == (2, 0, 0, [[]] * 3)
    del first
    assert pool.free == 20


@torch.no_grad()
def test_the_error_of_a_prompt_that_no_empty_pool_holds_names_more_than_is_free(tiny_llama):
    model = tiny_llama()
    pool = pool_of(model, 12)  # a layer's 2 KV heads alone need 26
    with pytest.raises(PoolFullError) as error:
        model(ids(1, 200), past_key_values=ag.EvictionCache(model, "full", pool=pool))
    assert error.value.blocks >= 26 and pool.free == 12


@torch.no_grad()
def test_what_is_protected_stays_so_after_a_prompt_that_did_not_fit(tiny_llama):
    model = tiny_llama()
    pool = pool_of(model, 24)
    other, cache = (ag.EvictionCache(model, *spec, pool=pool) for spec in (("full",), ("knorm", 8)))
    model(ids(1, 40), past_key_values=other)
    cache.protect([(3, 6)])
    for texts in (1, 2):
        with pytest.raises(PoolFullError):
            model(ids(texts, 60), past_key_values=cache)
    other.reset()
    model(ids(1, 60), past_key_values=cache)
    assert all({3, 4, 5} <= {*head} for layer in columns(cache) for head in layer[0])


def test_a_pool_of_another_model_or_type_is_refused(tiny_llama):
    pool = pool_of(tiny_llama(), 10)
    with refuses(UserError, "head_dim=16", "32", "ag.Pool"):
        ag.EvictionCache(tiny_llama(head_dim=32), "full", pool=pool)
    with refuses(UserError, "dtype=torch.float32", "torch.bfloat16"):
        ag.EvictionCache(tiny_llama().bfloat16(), "full", pool=pool)
    elsewhere = pool_of(tiny_llama(), 10)
    elsewhere.device = torch.device("meta")
    with refuses(UserError, "cpu", "meta"):
        ag.EvictionCache(tiny_llama(), "full", pool=elsewhere)


JOINED = {
    "scissorhands": (("scissorhands", 18, "every"), {"window": 9, "recent": 3}, {}),
    "cake": (("cake@preference", 18, "steps:2"), {"window": 4}, {}),
    "h2o": (("h2o@heads", 20, "every"), {}, {}),
    "kvzip": (("kvzip", 16), {"chunk": 16, "ask": "7 8"}, {}),
    "flags-window": (("gates",), {}, {"covers": "all", "window": 6, "recent_tokens": 5}),
    "ranked": (("gates@global", 16, "every"), {}, {"covers": "all", "window": 6}),
    "slots": (("h2o", 9, "every"), {"positions": "slot"}, {}),
}


def served(model, name, **options):
    given, more, gates = JOINED[name]
    if gates and attached_gates(model) is None:
        ag.attach(model, gates_for(model, **gates))
    return ag.EvictionCache(model, *given, **more, **options)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", JOINED)
def test_a_joined_batch_goes_on_as_each_text_alone(tiny_llama, tmp_path, name):
    """Texts of different lengths; one ends, another comes; the batch is saved and read on the way."""
    model = tiny_llama()
    pool, lengths = pool_of(model, 800), (31, 52, 40)
    texts = [ids(1, 90, seed) for seed in range(3)]
    mine = [served(model, name, pool=pool) for _ in texts]
    alone = [served(model, name) for _ in texts]
    at = list(lengths)

    def step(size):
        """Feed the next tokens to the batch, and to each text alone; all must see the same."""
        parts = [text[:, a : a + size] for text, a in zip(texts, at, strict=True)]
        together = model(torch.cat([parts[b] for b in batch]), past_key_values=mine[0]).logits
        for place, b in enumerate(batch):
            found = model(parts[b], past_key_values=alone[b]).logits[0]
            hold(together[place], found.double(), of_logits(model))
            at[b] += size
        assert columns(mine[0]) == [[columns(alone[b])[layer][0] for b in batch] for layer in range(3)]

    for text, cache, single, length in zip(texts, mine, alone, lengths, strict=True):
        for each in (cache, single):
            model(text[:, :length], past_key_values=each)
    batch = [0]
    for size in (1, 1, 3):
        step(size)
    free = pool.free
    mine[0].add(mine[1])
    assert (pool.free, mine[1].seen_tokens, mine[1].nbytes) == (free, 0, 0)
    batch = [0, 1]
    for size in (1, 1, 4, 1):
        step(size)
    share = mine[0].kept_share(prompt=True)
    assert share == pytest.approx(
        sum(c.kept_share(prompt=True) * n for c, n in zip(alone, lengths[:2], strict=False)) / 83
    )
    mine[0].save(tmp_path / "c")
    loaded, token = ag.EvictionCache.load(tmp_path / "c", model), torch.tensor([[5], [6]])
    copied = copy.deepcopy(mine[0])
    assert torch.equal(*(model(token, past_key_values=each).logits for each in (loaded, copied)))
    del loaded, copied
    mine[0].add(mine[2])
    batch = [0, 1, 2]
    for size in (1, 2, 1):
        step(size)
    with refuses(UserError, "remove([0, 7])", "0 to 2"):
        mine[0].remove([0, 7])
    mine[0].remove([0])
    batch = [1, 2]
    for size in (1, 1):
        step(size)
    for cache in mine:
        cache.reset()
    assert pool.free == pool.capacity


@torch.no_grad()
def test_what_cannot_join(tiny_llama):
    model, text = tiny_llama(), ids(1, 30)
    pool = pool_of(model, 400)
    ag.attach(model, gates_for(model))

    def cache(*policy, pool=pool, read=30):
        made = ag.EvictionCache(model, *(policy or ("h2o", 12)), pool=pool)
        if read:
            model(text[:, :read], past_key_values=made)
        return made

    mine = cache()
    before = columns(mine)
    flags = cache("gates")
    ag.detach(model)
    ag.attach(model, gates_for(model, seed=1))
    for one, other, word in (
        (mine, cache("h2o", 13), "policy"),
        (cache("h2o", 1), cache("h2o", 1.0), "policy"),
        (cache(ag.policy("h2o", 12, recent=1)), cache(ag.policy("h2o", 12, recent=1.0)), "policy"),
        (flags, cache("gates"), "gates"),
        (mine, cache(pool=None), "pool"),
        (mine, mine, "another"),
        (mine, cache(read=0), "prompt"),
    ):
        with refuses(UserError, "add", word):
            one.add(other)
    begun = cache(read=0)
    begun.expect(torch.ones(1, 30, dtype=torch.bool))
    model(text[:, :8], past_key_values=begun)
    with refuses(UserError, "add", "[8] of [30]"):
        mine.add(begun)
    other = tiny_llama(seed=1)
    stranger = ag.EvictionCache(other, "h2o", 12)
    with refuses(UserError, "add", "model"):
        mine.add(stranger)
    assert columns(mine) == before
    empty = cache(read=0)
    empty.protect([(0, 3)])
    with refuses(UserError, "protect()", "the cache that is added"):
        empty.add(mine)
    empty.reset()
    empty.add(mine)
    assert columns(empty) == before and mine.seen_tokens == 0
    model(text[:, :1], past_key_values=empty)


@pytest.mark.parametrize("blocks", [12, 17, 18])
@torch.no_grad()
def test_a_fork_that_has_no_room_is_refused_and_goes_on_later(tiny_llama, blocks):
    """A step of it copies the blocks that it writes into, and an eviction may copy every one that it shares."""
    model, text = tiny_llama(), ids(1, 30)
    pool = pool_of(model, blocks)
    cache, want = (ag.EvictionCache(model, "h2o", 16, "every", pool=x) for x in (pool, None))
    for one in (cache, want):
        model(text, past_key_values=one)
    fork = copy.deepcopy(cache)
    assert pool.num_used == 6  # 3 layers of 2 heads: a full block
    if blocks < 18:
        with refuses(PoolFullError, "1 tokens of each of 1"):
            model(text[:, :1], past_key_values=fork)
        cache.reset()  # from now on nothing is shared
    else:
        for one in (fork, want):
            model(text[:, :1], past_key_values=one)
    assert torch.equal(*(model(text[:, 1:2], past_key_values=x).logits for x in (fork, want)))


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


@torch.no_grad()
def test_chunks_below_the_budget_are_counted_whole(tiny_llama):
    """They stay until the budget is full, so that all of them are needed at once."""
    model, text = tiny_llama(), ids(1, 90)
    pool = pool_of(model, 36)  # 3 layers of 2 heads: 6 blocks, or 96 tokens, of each row
    other = ag.EvictionCache(model, "full", pool=pool)
    model(text[:, :30], past_key_values=other)
    cache = ag.EvictionCache(model, "tova", 64, "blocks:16", pool=pool)
    cache.expect(torch.ones_like(text, dtype=torch.bool))
    model(text[:, :16], past_key_values=cache)
    before = columns(cache)
    with refuses(PoolFullError, "64 tokens of each of 1"):  # up to the budget and a chunk
        model(text[:, 16:], past_key_values=cache)
    assert columns(cache) == before
    other.reset()
    model(text[:, 16:], past_key_values=cache)
    assert cache.seen_tokens == 90


@pytest.mark.parametrize("allocator", ["uniform", "heads", "global", "pyramid", "preference"])
@torch.no_grad()
def test_a_chunk_without_room_changes_nothing(tiny_llama, allocator):
    """Some rows may hold more than the budget."""
    model, text, num_refused = tiny_llama(), ids(1, 41), 0
    options = {"observers": 4} if allocator == "preference" else {}
    for blocks in range(10, 30):
        cache = ag.EvictionCache(model, f"knorm@{allocator}", 20, "blocks:7", pool=pool_of(model, blocks), **options)
        cache.expect(torch.ones_like(text, dtype=torch.bool))
        for chunk in text.split([14, 5, 6, 16], 1):
            before = columns(cache) if cache.seen_tokens else []
            try:
                model(chunk, past_key_values=cache)
            except PoolFullError:
                num_refused += 1
                assert (columns(cache) if cache.seen_tokens else []) == before
                break
    assert 0 < num_refused < 20


@pytest.mark.parametrize(("spec", "length"), [("full", 40), ("flags", 60)])
@torch.no_grad()
def test_a_fork_without_room_for_copies_keeps_what_no_query_sees(tiny_llama, tiny_mistral, spec, length):
    """Blocks that it shares stay whole while they cannot be copied; its logits are those of a pool that grows."""
    model = tiny_mistral(sliding_window=40) if spec == "full" else tiny_llama()
    if spec == "flags":
        ag.attach(model, gates_for(model, recent_tokens=8, covers="all"))
    caches = [ag.EvictionCache(model, spec, pool=pool) for pool in (pool_of(model, 49), None)]
    for cache in caches:
        model(ids(1, length), past_key_values=cache)
    fork, want = map(copy.deepcopy, caches)
    longer = 0
    with refuses(PoolFullError, "1 tokens of each of 1"):
        for token in row(90, 1):
            held = columns(fork)
            got = model(token[None, None], past_key_values=fork).logits
            hold(got, model(token[None, None], past_key_values=want).logits.double(), of_logits(model))
            longer += int(fork.state.stores[0].lengths_cpu.max()) > int(want.state.stores[0].lengths_cpu.max())
    assert longer and not fork.state.pass_open and columns(fork) == held


@torch.no_grad()
@pytest.mark.parametrize("kind", ["attention in chunks", "flags, positions by slot"])
def test_a_step_writes_into_no_block_that_another_sequence_reads(tiny_llama, kind):
    """Where the first step frees tokens, so that its token goes into a block that two sequences share."""
    if kind == "attention in chunks":
        model, policy, prompts = tiny("llama4_text"), "full", [[43]]  # the second step begins a chunk of 44
    else:
        model, policy = tiny_llama(), ag.policy("flags", positions="slot")
        ag.attach(model, gates_for(model, covers="all", recent_tokens=4))
        prompts = [[length - 26, 26] for length in range(30, 80)]  # some rows keep 16 or 32 tokens

    def read(passes, seed):
        cache = ag.EvictionCache(model, policy)
        for part in row(sum(passes), seed).split(passes):
            model(part[None], past_key_values=cache)
        return cache

    for seed, passes in enumerate(prompts):
        together, alone = read(passes, seed), [read(passes, seed) for _ in range(2)]
        together.batch_repeat_interleave(2)
        for step in range(3):
            tokens = torch.tensor([[5 + step], [9 + step]])
            found = model(tokens, past_key_values=together).logits
            expected = [model(each[None], past_key_values=c).logits for each, c in zip(tokens, alone, strict=True)]
            hold(found, torch.cat(expected), of_logits(model))


@torch.no_grad()
def test_cropping_the_newest_tokens_of_a_window_copies_nothing(tiny_mistral):
    model = tiny_mistral()
    pool = pool_of(model, 60)
    cache = ag.EvictionCache(model, "full", pool=pool)
    model(row(20)[None], past_key_values=cache)
    model(row(3)[None], past_key_values=cache)
    expected = copy.deepcopy(cache)
    expected.crop(-2)
    wanted = model(row(1)[None], past_key_values=expected).logits
    del expected
    fork = copy.deepcopy(cache)  # shares every block
    others = pool.allocate(pool.free)
    cache.crop(-2)
    pool.release(others)
    assert torch.equal(model(row(1)[None], past_key_values=cache).logits, wanted)
    assert fork.seen_tokens == 23


@torch.no_grad()
def test_a_crop_without_room_for_copies_is_not_gone_on_from(tiny_mistral):
    """The newest tokens have filled the slots of freed ones, so that rows are not only shortened."""
    model = tiny_mistral(sliding_window=100, max_position_embeddings=512)
    pool = pool_of(model, 200)
    cache = ag.EvictionCache(model, "full", pool=pool)
    for length in (100, *[6] * 11):  # the last pass frees what left the window
        model(row(length)[None], past_key_values=cache)
    fork = copy.deepcopy(cache)
    pool.allocate(pool.free)
    with pytest.raises(PoolFullError):
        cache.crop(-2)
    with refuses(UserError, "call cache.reset()"):
        model(row(1)[None], past_key_values=cache)
    assert fork.seen_tokens == 166


@torch.no_grad()
def test_where_address_space_is_limited_a_pool_grows_by_copying(tiny_llama, monkeypatch):
    """As under ``ulimit -v``."""
    model, text = tiny_llama(), ids(1, 90)
    want = model(text, past_key_values=ag.EvictionCache(model, "full")).logits

    def refused(*args, **options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("ag.engine.block_pool.mmap.mmap", refused)
    monkeypatch.setattr("ag.engine.block_pool.FIRST", 4)
    cache = ag.EvictionCache(model, "full")
    assert cache.setup.pool.capacity == 4
    assert torch.equal(model(text, past_key_values=cache).logits, want)
    assert cache.setup.pool.capacity >= 36
