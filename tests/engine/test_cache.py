"""The cache that evicts, against forward passes written out with dense masks (``by_hand``)."""

import copy

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaForCausalLM

import ag
from ag.errors import UserError
from ag.model.hooks import cache_argument
from tests.support import by_hand
from tests.support.batches import columns, padded, read, row, step
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.memory import storages
from tests.support.refused import refuses

GREEDY = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
VARIANTS = {
    "causal": {},
    "prompt": {"scope": "prompt"},
    "recent-sinks": {"recent_tokens": 5, "sink_tokens": 2},
    "query-heads-dense": {"granularity": "query_head", "prefill": "dense", "recent_tokens": 3},
    "previous-layer": {"layer_offset": 1, "first_layer": 1},
}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_kept_positions_and_logits_of_a_padded_batch(tiny_llama, variant):
    model = tiny_llama()
    gates = gates_for(model, **VARIANTS[variant])
    ag.attach(model, gates)
    rows, prompts, length = [row(32, 1), row(25, 2), row(11, 3)], [24, 17, 3], 24
    batch = padded([tokens[:p] for tokens, p in zip(rows, prompts, strict=True)])
    cache, mask = ag.EvictionCache(model, "gates"), batch["attention_mask"]
    wanted = [by_hand.forward(model, gates, tokens, p) for tokens, p in zip(rows, prompts, strict=True)]
    logits = step(model, cache, batch["input_ids"], mask)[:, -1]
    for after in range(8):
        for b, (prompt, (want, flags)) in enumerate(zip(prompts, wanted, strict=True)):
            hold(logits[b], want[prompt + after - 1], of_logits(model))
            for layer in range(3):
                everything = [list(range(prompt + after))] * 2
                oracle = (
                    by_hand.kept(gates, flags[layer], prompt, prompt + after, prompt + after - 1)
                    if layer in flags
                    else everything
                )
                assert columns(cache)[layer][b] == oracle
        assert cache.seen_tokens == length + after
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
        new = torch.stack([tokens[p + after] for tokens, p in zip(rows, prompts, strict=True)])[:, None]
        logits = step(model, cache, new, mask)[:, -1]
    assert 0.3 < cache.kept_share() < 0.95


@pytest.mark.parametrize("copying", [False, True], ids=["grows in place", "grows by copying"])
def test_evicted_memory_is_free(tiny_llama, monkeypatch, copying):
    if copying:
        monkeypatch.setattr("ag.engine.block_pool.RESERVES", False)
    model = tiny_llama(max_position_embeddings=2048)
    ag.attach(model, gates_for(model, **VARIANTS["recent-sinks"]))
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


@pytest.mark.parametrize(("spec", "length"), [("gates", 4), ("h2o", 26), ("full", 35)])
def test_another_text_of_no_more_tokens_than_were_seen(tiny_llama, spec, length):
    model = tiny_llama()
    ag.attach(model, gates_for(model, scope="prompt"))
    cache = ag.EvictionCache(model, spec, 8 if spec == "h2o" else None)
    first = model.generate(row(26)[None], past_key_values=cache, **GREEDY)
    assert cache.seen_tokens == first.shape[1] - 1 == 35
    before = columns(cache)[0]
    with refuses(UserError, f"{length} tokens", "35", FRESH):
        model.generate(row(length, 5)[None], past_key_values=cache, **GREEDY)
    assert columns(cache)[0] == before and cache.seen_tokens == 35
    cache.reset()
    again = model.generate(row(length, 5)[None], past_key_values=cache, **GREEDY)
    fresh = ag.EvictionCache(model, spec, 8 if spec == "h2o" else None)
    assert torch.equal(again, model.generate(row(length, 5)[None], past_key_values=fresh, **GREEDY))


@pytest.mark.parametrize(("column", "value"), [(0, 7), (25, 7), (26, 7), (34, 7)])
def test_another_text_that_is_longer(tiny_llama, column, value):
    """Also one that differs only in what was generated."""
    model = tiny_llama()
    cache = ag.EvictionCache(model, "h2o", budget=8)
    first = model.generate(row(26)[None], past_key_values=cache, **GREEDY)
    other = torch.cat([first, row(8, 9)[None]], 1)
    other[0, column] = value if other[0, column] != value else value + 1
    with refuses(UserError, f"column {column}", FRESH):
        model.generate(other, past_key_values=cache, **GREEDY)
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


@torch.no_grad()
def test_forward_passes_by_hand_name_the_way_out(tiny_llama):
    model = tiny_llama()
    cache = ag.EvictionCache(model, "h2o", budget=8)
    model(row(12)[None], past_key_values=cache)
    with refuses(UserError, FRESH):
        model(row(9)[None], attention_mask=torch.ones(1, 9), past_key_values=cache)
    with refuses(UserError, FRESH):
        model(torch.stack([row(9), row(9)]), past_key_values=cache)


def test_later_turns_of_different_lengths(tiny_llama):
    model = tiny_llama()
    gates = gates_for(model, recent_tokens=6)
    ag.attach(model, gates)
    rows, prompts, new = [row(29, 1), row(18, 2)], [20, 11], [9, 7]
    batch, cache = padded([r[:p] for r, p in zip(rows, prompts, strict=True)]), ag.EvictionCache(model, "gates")
    step(model, cache, *batch.values())
    turn = padded([r[p:] for r, p in zip(rows, prompts, strict=True)])
    logits = step(model, cache, turn["input_ids"], torch.cat([batch["attention_mask"], turn["attention_mask"]], 1))
    for b, (tokens, prompt) in enumerate(zip(rows, prompts, strict=True)):
        want, flags = by_hand.forward(model, gates, tokens, prompt)
        hold(logits[b, 9 - new[b] :], want[prompt:], of_logits(model))
        assert columns(cache)[2][b] == by_hand.kept(gates, flags[2], prompt, len(tokens), prompt)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_mistral", "tiny_qwen2", "tiny_qwen3"])
def test_full_generates_the_text_of_the_untouched_model(family, request):
    model = request.getfixturevalue(family)()
    batch = padded([row(37, 1), row(20, 2)])
    options = GREEDY | {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 20}
    plain = model.generate(**batch, **options)
    served = model.generate(**batch, past_key_values=ag.EvictionCache(model, "full"), **options)
    assert torch.equal(served.sequences, plain.sequences)
    hold(torch.stack(served.logits), torch.stack(plain.logits), of_logits(model))


@torch.no_grad()
def test_crop_gives_back_what_gates_of_a_prompt_allow(tiny_llama):
    model = tiny_llama()
    ag.attach(model, gates_for(model, recent_tokens=6))
    cache = read(model, row(20), "gates")
    with refuses(UserError, "crop", "19 tokens", "first 20"):
        cache.crop(-1)
    straight = copy.deepcopy(cache)
    for token in row(4):
        model(token.view(1, 1), past_key_values=cache)
    cache.crop(-4)
    for token in row(9):
        got, want = (model(token.view(1, 1), past_key_values=each).logits for each in (cache, straight))
        hold(got, want, of_logits(model))
    assert columns(cache) == columns(straight)


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


def test_gates_of_another_model(tiny_llama, tmp_path):
    gates_for(tiny_llama(num_hidden_layers=2)).save_pretrained(tmp_path / "gates")
    with pytest.raises(UserError, match=r"another model: num_layers 2 .* 3"):
        ag.EvictionCache(tiny_llama(), f"gates:{tmp_path / 'gates'}")


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


def test_a_bfloat16_model_with_float32_gates(tiny_llama):
    """bfloat16 keeps 8 bits: each of the two passes is off by about its own rounding, measured against float32."""
    model, exact = tiny_llama().bfloat16(), tiny_llama().bfloat16().float()
    gates = gates_for(exact, kind="linear")
    served, masked, share = served_and_masked(model, gates, row(40), 30)
    assert next(gates.parameters()).dtype == torch.float32
    want = by_hand.forward(exact, gates, row(40), 30)[0][29:]
    assert served.dtype == torch.bfloat16
    for got in (served, masked):
        assert (got.float() - want).norm() / want.norm() < 0.05
    assert 0.2 < share < 0.95


def test_everything_that_generate_can_return(tiny_llama):
    model = tiny_llama(attn_implementation="eager")
    gates = gates_for(model)
    ag.attach(model, gates)
    cache = ag.EvictionCache(model, "gates")
    wanted = ("output_logits", "output_hidden_states", "return_dict_in_generate")
    out = model.generate(row(30)[None], past_key_values=cache, **GREEDY, **dict.fromkeys(wanted, True))
    assert getattr(out, cache_argument(type(model))) is cache
    logits = by_hand.forward(model, gates, out.sequences[0], 30)[0][29:-1]
    hold(torch.cat(out.logits), logits, of_logits(model))
    assert [len(step) for step in out.hidden_states] == [4] * 10


@pytest.mark.parametrize("how", ["argument", "config", "model"])
def test_a_prompt_in_chunks_is_refused(tiny_llama, how):
    model, ids = tiny_llama(), row(30)[None]
    ag.attach(model, gates_for(model, scope="prompt"))
    cache, arguments = ag.EvictionCache(model, "gates"), GREEDY
    if how == "argument":
        arguments = GREEDY | {"prefill_chunk_size": 8}
    elif how == "model":
        model.generation_config.prefill_chunk_size = 8
    else:
        config = model.generation_config.from_dict(model.generation_config.to_dict() | GREEDY)
        config.prefill_chunk_size = 8
        arguments = {"generation_config": config}
    with pytest.raises(UserError, match="gate.scope=prompt.* 8 of 30 tokens.*prefill_chunk_size"):
        model.generate(ids, past_key_values=cache, **arguments)
    assert model.generate(ids, **arguments).shape == (1, 40)
    ag.detach(model)
    assert "generate" not in vars(model)
