"""A cache and the model and texts that it belongs to: what goes on, what is refused, what is freed."""

import copy

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaForCausalLM

import ag
from ag.errors import UserError
from ag.model.hooks import cache_argument
from tests.support.batches import columns, padded, row, step
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
    address_space = {x.untyped_storage().data_ptr() for x in cache.pool.columns() if cache.pool._reserved}
    new = sum(size for place, size in after.items() if place not in {*before, *address_space})
    new += cache.nbytes if address_space else 0  # of which blocks are taken
    slots = cache.nbytes // (2 * 16 * 4)
    bookkeeping = slots * (4 + 1) + 20 * 1500  # rank and mark of a slot; a few vectors over the input row
    assert cache.nbytes <= new <= cache.nbytes + bookkeeping
    assert cache.nbytes < 0.9 * 3 * 2 * 1500 * 2 * 16 * 4


FRESH = "cache.reset()"


@pytest.mark.parametrize("column", [0, 26, 34])
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


@torch.no_grad()
def test_texts_that_go_on(tiny_llama):
    """One token more; after a crop; after a prompt read by hand; with other sequences selected; sampled twice."""
    model = tiny_llama()
    cache = ag.EvictionCache(model, "full")
    options = {"max_new_tokens": 1, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    text = row(12)[None]
    for _ in range(3):
        text = model.generate(text, past_key_values=cache, **options)
    assert (cache.seen_tokens, text.shape[1]) == (14, 15)
    cache.crop(-4)
    other = torch.cat([text[:, :10], row(3, 8)[None]], 1)  # goes on from what is left
    model.generate(other, past_key_values=cache, **options)
    by_hand_first = ag.EvictionCache(model, "full")
    model(text, past_key_values=by_hand_first)
    model.generate(torch.cat([text, text[:, :2]], 1), past_key_values=by_hand_first, **options)
    two = ag.EvictionCache(model, "full")
    pair = model.generate(torch.stack([row(9, 1), row(9, 2)]), past_key_values=two, **options)
    two.batch_select_indices(torch.tensor([1, 0]))
    model.generate(torch.cat([pair[[1, 0]], row(2)[None].expand(2, -1)], 1), past_key_values=two, **options)
    drawn = ag.EvictionCache(model, "full")
    some = model.generate(row(9)[None], past_key_values=drawn, max_new_tokens=4, num_return_sequences=3, do_sample=True)
    copy.deepcopy(drawn).reset()
    model.generate(torch.cat([some, some[:, :2]], 1), past_key_values=drawn, **options)


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


def served_and_masked(model, gates, tokens, prompt):
    """Logits of the tokens after the prompt: from an eviction cache, and under masks; kept share of the cache."""
    ag.attach(model, gates)
    cache, mask = ag.EvictionCache(model, "gates"), torch.ones(1, len(tokens), dtype=torch.long)
    served = [step(model, cache, tokens[None, :prompt], mask[:, :prompt])[0, -1:]]
    served += [step(model, cache, tokens[None, t : t + 1], mask[:, : t + 1])[0] for t in range(prompt, len(tokens))]
    gating = ag.Gating(gates, mask, torch.tensor([prompt]))
    with torch.no_grad():
        masked = model(tokens[None], gating=gating, use_cache=False).logits[0, prompt - 1 :]
    return torch.cat(served), masked, cache.kept_share()


@pytest.mark.slow
def test_a_4_bit_model(tiny_llama, tmp_path):
    """The weights are the same 4 bits on both sides; only the order of float32 sums differs, as in test_parity."""
    tiny_llama().save_pretrained(tmp_path)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    )
    model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=quantised, device_map={"": "cpu"}).eval()
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"
    served, masked, share = served_and_masked(model, gates_for(model, recent_tokens=2), row(40), 30)
    hold(served, masked, of_logits(tiny_llama()))
    assert 0.2 < share < 0.95


def test_everything_that_generate_can_return(tiny_llama):
    model = tiny_llama(attn_implementation="eager")
    gates = gates_for(model)
    ag.attach(model, gates)
    cache = ag.EvictionCache(model, "gates")
    wanted = ("output_logits", "output_hidden_states", "return_dict_in_generate")
    out = model.generate(row(30)[None], past_key_values=cache, **GREEDY, **dict.fromkeys(wanted, True))
    assert getattr(out, cache_argument(type(model))) is cache
    gating = ag.Gating(gates, torch.ones_like(out.sequences), torch.tensor([30]))
    with torch.no_grad():
        logits = model(out.sequences, gating=gating, use_cache=False).logits[0, 29:-1]
    hold(torch.cat(out.logits), logits, of_logits(model))
    assert [len(step) for step in out.hidden_states] == [4] * 10


@pytest.mark.parametrize("how", ["argument", "model"])
def test_a_prompt_in_chunks_is_refused(tiny_llama, how):
    model, ids = tiny_llama(), row(30)[None]
    ag.attach(model, gates_for(model, scope="prompt"))
    cache, arguments = ag.EvictionCache(model, "gates"), GREEDY
    if how == "argument":
        arguments = GREEDY | {"prefill_chunk_size": 8}
    elif how == "model":
        model.generation_config.prefill_chunk_size = 8
    with pytest.raises(UserError, match="gate.scope=prompt.* 8 of 30 tokens.*prefill_chunk_size"):
        model.generate(ids, past_key_values=cache, **arguments)
    assert model.generate(ids, **arguments).shape == (1, 40)
    ag.detach(model)
    assert "generate" not in vars(model)


@pytest.mark.parametrize("layer", [0, 2])
@torch.no_grad()
def test_a_pass_that_is_broken_off_is_noticed(tiny_llama, layer):
    model, ids = tiny_llama(), row(20)[None]
    cache, want = (ag.EvictionCache(model, "h2o", 10) for _ in range(2))

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[layer].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids, past_key_values=cache)
    handle.remove()
    with refuses(UserError, "broken off", FRESH):
        model(ids[:, :1], past_key_values=cache)
    cache.reset()
    assert torch.equal(*(model(ids, past_key_values=x).logits for x in (cache, want)))
