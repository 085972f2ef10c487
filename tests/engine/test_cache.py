"""A cache and the model and texts that it belongs to: what goes on, what is refused, what is freed."""

import pytest
import torch

import ag
from ag.engine import cached_kv
from ag.engine.kv_store import KVStore
from ag.errors import UserError
from tests.support.batches import columns, padded, read, row, step
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.memory import storages
from tests.support.refused import refuses

GREEDY = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}


@pytest.mark.parametrize("copying", [False, True], ids=["grows in place", "grows by copying"])
def test_evicted_memory_is_free(tiny_llama, monkeypatch, copying):
    if copying:
        monkeypatch.setattr("ag.engine.block_pool.RESERVES", False)
    model = tiny_llama(max_position_embeddings=2048)
    ag.attach(model, gates_for(model, recent_tokens=5, sink_tokens=2))
    ids = row(1500)[None]
    before = storages()
    cache = ag.EvictionCache(model, "gates")
    step(model, cache, ids, torch.ones_like(ids))
    after = storages()
    address_space = {x.untyped_storage().data_ptr() for x in cache.setup.pool.columns() if cache.setup.pool._reserved}
    new = sum(size for place, size in after.items() if place not in {*before, *address_space})
    new += cache.nbytes if address_space else 0  # of which blocks are taken
    slots = cache.nbytes // (2 * 16 * 4)
    bookkeeping = slots * (4 + 1) + 20 * 1500  # token index and mark of a slot; a few vectors over the input row
    assert cache.nbytes <= new <= cache.nbytes + bookkeeping
    assert cache.nbytes < 0.9 * 3 * 2 * 1500 * 2 * 16 * 4


@torch.no_grad()
@pytest.mark.parametrize(("given", "once"), [(("full",), True), (("streaming_llm", 40), False)])
def test_a_pool_that_copies_is_made_for_a_prompt_that_stays(tiny_llama, monkeypatch, given, once):
    """It is as large as the prompt at once; a prompt that is evicted from takes what its layers need in turn."""
    monkeypatch.setattr("ag.engine.block_pool.RESERVES", False)
    monkeypatch.setattr("ag.engine.block_pool.FIRST", 1)
    model = tiny_llama()
    cache = ag.EvictionCache(model, *given)
    step(model, cache, row(200)[None], torch.ones(1, 200, dtype=torch.long))
    assert cache.setup.pool.capacity == cache.setup.pool.num_used
    assert (cache.setup.pool.version == 1) == once


FRESH = "cache.reset()"


@pytest.mark.parametrize("column", [0, 34])
def test_another_text_is_refused(tiny_llama, column):
    """One that is shorter, and one that differs from what was read or generated."""
    model = tiny_llama()
    cache = ag.EvictionCache(model, "h2o", budget=8)
    first = model.generate(row(26)[None], past_key_values=cache, **GREEDY)
    before = columns(cache)
    with refuses(UserError, "26 tokens", "35", FRESH):
        model.generate(row(26, 5)[None], past_key_values=cache, **GREEDY)
    other = torch.cat([first, row(8, 9)[None]], 1)
    other[0, column] = 8 - (other[0, column] == 8).long()
    with refuses(UserError, f"column {column}", FRESH):
        model.generate(other, past_key_values=cache, **GREEDY)
    assert columns(cache) == before and cache.seen_tokens == 35
    other[0, 35] += 1  # the last generated token, which the cache has not seen, may be another one
    other[0, column] = first[0, column]
    model.generate(other, past_key_values=cache, **GREEDY)


@pytest.mark.parametrize("family", ["tiny_mistral", "tiny_qwen3"])
def test_full_generates_the_text_of_the_untouched_model(family, request):
    model = request.getfixturevalue(family)()
    batch = padded([row(37, 1), row(20, 2)])
    options = GREEDY | {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 20}
    plain = model.generate(**batch, **options)
    served = model.generate(**batch, past_key_values=ag.EvictionCache(model, "full"), **options)
    assert torch.equal(served.sequences, plain.sequences)
    hold(torch.stack(served.logits), torch.stack(plain.logits), of_logits(model))


@torch.no_grad()
def test_a_cache_belongs_to_one_model_batch_and_mask(tiny_llama):
    model, ids = tiny_llama(), row(20)[None]
    gates = gates_for(model)
    with pytest.raises(UserError, match=r"ag.attach\(model, gates\).*gates:PATH"):
        ag.EvictionCache(model, "gates")
    ag.attach(model, gates)
    cache = ag.EvictionCache(model, "gates")
    model(ids, past_key_values=cache)
    one = torch.ones(1, 21, dtype=torch.long)
    other, instrumented = tiny_llama(seed=1), tiny_llama(seed=1)
    ag.EvictionCache(instrumented, "full")
    for stranger in (other, instrumented):
        for tokens in (ids, ids[:, :1]):
            with pytest.raises(UserError, match="another model"):
                stranger(tokens, past_key_values=cache)
    with pytest.raises(UserError, match="another model"):
        other(ids, past_key_values=ag.EvictionCache(model, "gates"))
    with pytest.raises(UserError, match=" 1 sequences.* 2"):
        model(ids[:, :1].repeat(2, 1), past_key_values=cache)
    with pytest.raises(UserError, match=r"attention_mask \(1, 1\): .*\(1, 21\)"):
        model(ids[:, :1], attention_mask=one[:, :1], past_key_values=cache)
    with pytest.raises(UserError, match=r"attention_mask \[1, 1, 1, 21\]"):
        model(ids[:, :1], attention_mask=one[None, None], past_key_values=cache)
    assert cache.seen_tokens == 20
    model(ids[:, :1], attention_mask=one, past_key_values=cache)
    assert cache.seen_tokens == 21


@torch.no_grad()
@pytest.mark.parametrize("empty", [lambda cache: cache.batch_select_indices([]), lambda cache: cache.remove([0, 1])])
def test_a_cache_without_sequences_is_empty(tiny_llama, empty):
    model = tiny_llama()
    cache = ag.EvictionCache(model, "h2o", 8)
    model(torch.randint(3, 128, (2, 20)), past_key_values=cache)
    empty(cache)
    assert (cache.seen_tokens, cache.nbytes, repr(cache).endswith("empty>")) == (0, 0, True)
    model(torch.randint(3, 128, (3, 20)), past_key_values=cache)  # of another batch size


def test_a_prompt_in_chunks_is_refused(tiny_llama):
    model, ids = tiny_llama(), row(30)[None]
    ag.attach(model, gates_for(model, scope="prompt"))
    cache, arguments = ag.EvictionCache(model, "gates"), GREEDY | {"prefill_chunk_size": 8}
    with pytest.raises(UserError, match="gate.scope=prompt.* 8 of 30 tokens.*prefill_chunk_size"):
        model.generate(ids, past_key_values=cache, **arguments)
    assert model.generate(ids, **arguments).shape == (1, 40)
    ag.detach(model)
    assert "generate" not in vars(model)


@torch.no_grad()
def test_a_pass_that_is_broken_off_is_noticed(tiny_llama):
    model, ids = tiny_llama(), row(20)[None]
    cache, want = (ag.EvictionCache(model, "h2o", 10) for _ in range(2))

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[2].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids, past_key_values=cache)
    handle.remove()
    with refuses(UserError, "broken off", FRESH):
        model(ids[:, :1], past_key_values=cache)
    cache.reset()
    assert torch.equal(*(model(ids, past_key_values=x).logits for x in (cache, want)))


@torch.no_grad()
@pytest.mark.parametrize("method", ["select", "add"])
def test_a_change_of_the_batch_that_is_broken_off_is_noticed(tiny_llama, monkeypatch, method):
    model = tiny_llama()
    pool = ag.Pool(model, 2**20)
    cache, other = (read(model, torch.stack([row(20), row(20, seed)]), "h2o", 10, pool=pool) for seed in (1, 2))

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(KVStore, method, interrupt)
        cache.reorder_cache(torch.tensor([1, 0])) if method == "select" else cache.add(other)
    for changed in (cache, *([other] if method == "add" else [])):
        with refuses(UserError, "broken off", FRESH):
            model(row(1)[None].expand(2, 1), past_key_values=changed)


@torch.no_grad()
def test_a_refused_crop_changes_nothing(tiny_llama):
    model = tiny_llama()
    caches = [read(model, row(20), "h2o", 8) for _ in range(2)]
    for cache in caches:
        model(row(2)[None], past_key_values=cache)
    with refuses(UserError, "would have 12 tokens", "crop at most 2"):
        caches[0].crop(-10)
    with refuses(UserError, "crop([1, 2, 3])", "1 sequences"):
        caches[0].crop([1, 2, 3])
    for cache in caches:
        cache.crop(-2)
    assert torch.equal(*(model(row(1)[None], past_key_values=cache).logits for cache in caches))


@torch.no_grad()
def test_a_batch_may_follow_a_text_that_was_taken_back_whole(tiny_llama):
    model = tiny_llama()
    ag.attach(model, gates_for(model, covers="all", bias=99.0))  # which evict nothing
    cache, want = (ag.EvictionCache(model, "gates") for _ in range(2))
    model(row(5)[None], past_key_values=cache)
    cache.crop(torch.tensor([5]))
    assert cache.seen_tokens == 0
    both = row(18).view(2, 9)
    assert torch.equal(*(model(both, past_key_values=each).logits for each in (cache, want)))


@torch.no_grad()
def test_the_length_within_a_call_of_several_passes_is_that_before_the_call(tiny_llama, monkeypatch):
    model, lengths = tiny_llama(), []
    cache = ag.EvictionCache(model, "h2o", 6, "blocks:8+every")
    own = cache.interceptor.attend
    monkeypatch.setattr(cache.interceptor, "attend", lambda call: lengths.append(cache.get_seq_length()) or own(call))
    model(row(20)[None], past_key_values=cache)
    assert len(lengths) == 9 and {*lengths} == {0} and cache.get_seq_length() == 20
    model(row(2)[None], past_key_values=cache)
    assert {*lengths[9:]} == {20} and cache.get_seq_length() == 22


def test_uneven_heads_are_not_gathered(tiny_llama, monkeypatch):
    model = tiny_llama()
    ag.attach(model, gates_for(model, recent_tokens=5))
    ids = torch.randint(3, 128, (1, 60), generator=torch.Generator().manual_seed(0))
    for policy in (("gates",), ("snapkv@heads", 40)):
        cache = ag.EvictionCache(model, *policy)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            assert any(len(set(held.flatten().tolist())) > 1 for held in cache.state.stores[0].lengths_cpu)
            with monkeypatch.context() as patch:
                patch.setattr(cached_kv, "read", lambda *_: pytest.fail("the layer was gathered"))
                for _ in range(3):
                    model(ids[:, :1], past_key_values=cache)
        assert cache.seen_tokens == 63


@pytest.mark.parametrize("policy", [("h2o", 20, "every"), ("gates",)], ids=str)
def test_gradients_do_not_go_through_a_cache(tiny_llama, policy):
    """Not from its weights, and not from what it is given; without either the cache goes on."""
    model = tiny_llama()
    ag.attach(model, gates_for(model, recent_tokens=5))
    ids = torch.randint(3, 128, (1, 60), generator=torch.Generator().manual_seed(0))
    cache = ag.EvictionCache(model, *policy)
    with refuses(UserError, "gradients", "torch.no_grad()", "cache.reset()"):
        model(ids, past_key_values=cache)
    model.requires_grad_(False)
    cache.reset()
    model(ids, past_key_values=cache)  # what the message says is enough
    with refuses(UserError, "gradients", "torch.no_grad()"):
        embeds = model.get_input_embeddings()(ids[:, :1]).requires_grad_()
        model(inputs_embeds=embeds, past_key_values=cache)


@pytest.mark.parametrize("model", ["smollm2", None])
def test_a_cache_of_something_that_is_no_model(model):
    for spec in ("h2o", "gates"):
        with refuses(UserError, f"model={model!r}", "ag.load_base('smollm2')"):
            ag.EvictionCache(model, spec, 0.3)
    with refuses(UserError, "spec=0.3", "'h2o'"):
        ag.EvictionCache(model, 0.3)


@pytest.mark.parametrize("setting", [{"budget": 0.5}, {"schedule": "every"}, {"sinks": 2}])
def test_settings_beside_a_policy_are_refused(tiny_llama, setting):
    with refuses(UserError, "h2o", "budget, schedule and options", "ag.policy"):
        ag.EvictionCache(tiny_llama(), ag.policy("h2o", 0.3), **setting)
