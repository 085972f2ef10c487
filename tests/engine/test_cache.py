"""The cache that evicts, against forward passes written out with dense masks (``by_hand``)."""

import copy
import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensor
from transformers import BitsAndBytesConfig, Gemma3ForCausalLM, Gemma3TextConfig, LlamaForCausalLM

import ag
from ag.errors import UserError
from tests.support import by_hand
from tests.support.bounds import hold, of_logits, of_nats, premise
from tests.support.gates_for import gates_for

GREEDY = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
VARIANTS = {
    "causal": {},
    "prompt": {"scope": "prompt"},
    "recent-sinks": {"recent_tokens": 5, "sink_tokens": 2},
    "query-heads-dense": {"granularity": "query_head", "prefill": "dense", "recent_tokens": 3},
    "previous-layer": {"layer_offset": 1, "first_layer": 1},
}


def row(length, seed=0):
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed))


def left_padded(rows):
    longest = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for i, tokens in enumerate(rows):
        ids[i, longest - len(tokens) :], mask[i, longest - len(tokens) :] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def step(model, cache, new, mask):
    """One forward pass over the new columns of a batch; returns the logits."""
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -new.shape[1] :]
    return model(new, attention_mask=mask, position_ids=positions, past_key_values=cache).logits


def lists(positions):
    return [[head.tolist() for head in heads] for heads in positions]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_kept_positions_and_logits_of_a_padded_batch(tiny_llama, variant):
    model = tiny_llama()
    gates = gates_for(model, **VARIANTS[variant])
    ag.attach(model, gates)
    rows, prompts, length = [row(32, 1), row(25, 2), row(11, 3)], [24, 17, 3], 24
    batch = left_padded([tokens[:p] for tokens, p in zip(rows, prompts, strict=True)])
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
                shifted = [[length - prompt + t for t in head] for head in oracle]
                held = lists(cache.kept_positions(layer))[b]
                assert held == shifted
        assert cache.seen_tokens == length + after
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
        new = torch.stack([tokens[p + after] for tokens, p in zip(rows, prompts, strict=True)])[:, None]
        logits = step(model, cache, new, mask)[:, -1]
    assert 0.3 < cache.kept_share() < 0.95


def test_kept_share_counts_real_tokens_of_all_layers(tiny_llama):
    model = tiny_llama()
    gates = gates_for(model, first_layer=1)
    ag.attach(model, gates)
    rows = [row(24, 1), row(9, 2)]
    cache = ag.EvictionCache(model, "gates")
    assert (cache.kept_share(), cache.nbytes, cache.seen_tokens, cache.kept_positions(0)) == (1.0, 0, 0, [])
    step(model, cache, *left_padded(rows).values())
    flags = [by_hand.forward(model, gates, tokens, len(tokens))[1] for tokens in rows]
    held = sum(
        len(head) for layers in flags for f in layers.values() for head in by_hand.kept(gates, f, *[f.shape[1]] * 2)
    )
    held += 2 * (24 + 9)
    assert cache.kept_share() == pytest.approx(held / (3 * 2 * (24 + 9)))


def test_bytes_fall_with_what_is_kept(tiny_llama):
    model = tiny_llama(max_position_embeddings=2048)
    ag.attach(model, gates_for(model))
    ids = row(1200)[None]
    token = 2 * 16 * 4  # keys and values, head_dim, float32
    sizes = {}
    for spec in ("full", "gates"):
        cache = ag.EvictionCache(model, spec)
        step(model, cache, ids, torch.ones_like(ids))
        held = sum(len(head) for layer in range(3) for head in cache.kept_positions(layer)[0])
        assert held * token <= cache.nbytes <= 1.1 * held * token
        sizes[spec] = held
    assert sizes["full"] == 3 * 2 * 1200
    assert 0.1 < sizes["gates"] / sizes["full"] < 0.9


def storages():
    """Bytes of every tensor storage in memory that Python can reach, by address."""
    gc.collect()
    # Tests that compile leave FakeTensors behind, which say that they are on the CPU and have no memory.
    tensors = (x for x in gc.get_objects() if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor))
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


@pytest.mark.parametrize("variant", ["causal", "recent-sinks"])
def test_evicted_memory_is_free(tiny_llama, variant):
    model = tiny_llama(max_position_embeddings=2048)
    ag.attach(model, gates_for(model, **VARIANTS[variant]))
    ids = row(1500)[None]
    before = storages()
    cache = ag.EvictionCache(model, "gates")
    step(model, cache, ids, torch.ones_like(ids))
    after = storages()
    new = sum(size for place, size in after.items() if place not in before)
    slots = cache.nbytes // (2 * 16 * 4)
    bookkeeping = slots * (4 + 1) + 20 * 1500  # rank and mark of a slot; a few vectors over the input row
    assert cache.nbytes <= new <= cache.nbytes + bookkeeping
    assert cache.nbytes < 0.9 * 3 * 2 * 1500 * 2 * 16 * 4


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_mistral"])
def test_a_batch_generates_the_text_of_single_prompts(family, seed, request):
    model = request.getfixturevalue(family)(seed=seed)
    gates = gates_for(model, seed=seed, recent_tokens=3, sink_tokens=1)
    ag.attach(model, gates)
    rows = [row(n, 10 * seed + n) for n in (33, 20, 7)]
    cache = ag.EvictionCache(model, "gates")
    text = model.generate(**left_padded(rows), past_key_values=cache, **GREEDY)[:, 33:]
    for b, tokens in enumerate(rows):
        alone = ag.EvictionCache(model, "gates")
        single = model.generate(tokens[None], past_key_values=alone, **GREEDY)[0, len(tokens) :]
        masked = by_hand.greedy(model, gates, tokens, len(tokens), 10)
        assert text[b].tolist() == single.tolist() == masked
        for layer in range(3):
            moved = [[33 - len(tokens) + t for t in head] for head in lists(alone.kept_positions(layer))[0]]
            assert lists(cache.kept_positions(layer))[b] == moved


def test_sampling_follows_the_masked_distribution(tiny_llama):
    model = tiny_llama()
    gates = gates_for(model)
    ag.attach(model, gates)
    ids = row(30)
    torch.manual_seed(4)
    cache = ag.EvictionCache(model, "gates")
    sampling = {"do_sample": True, "top_k": 0, "temperature": 0.7, "max_new_tokens": 12, "min_new_tokens": 12}
    text = model.generate(ids[None], past_key_values=cache, **sampling)[0, 30:]
    torch.manual_seed(4)
    tokens = ids
    for _ in range(12):
        logits = by_hand.forward(model, gates, tokens, 30)[0][-1]
        logits[2] = float("-inf")  # no end of sequence before min_new_tokens
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.7).softmax(-1), 1)])
    assert text.tolist() == tokens[30:].tolist()


def test_beam_search_scores_each_beam_by_its_own_tokens(tiny_llama):
    model = tiny_llama(initializer_range=0.08)  # flatter distributions: beams that swap
    gates = gates_for(model)
    batch, beams = left_padded([row(30, 1), row(22, 2)]), {"num_beams": 3, "num_return_sequences": 3}
    plain = model.generate(**batch, **beams, **GREEDY)
    full = model.generate(**batch, past_key_values=ag.EvictionCache(model, "full"), **beams, **GREEDY)
    assert torch.equal(full, plain)
    ag.attach(model, gates)
    cache = ag.EvictionCache(model, "gates")
    orders = []
    reorder = cache.reorder_cache
    cache.reorder_cache = lambda chosen: (orders.append(chosen.tolist()), reorder(chosen))
    out = model.generate(
        **batch,
        past_key_values=cache,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
        **beams,
        **GREEDY,
    )
    assert any(order != sorted(order) or len(set(order[:3])) < 3 for order in orders[1:]), "no beam ever moved"
    for i, (sequence, score) in enumerate(zip(out.sequences, out.sequences_scores, strict=True)):
        prompt = int(batch["attention_mask"][i // 3].sum())
        tokens = sequence[30 - prompt :]
        logits = by_hand.forward(model, gates, tokens, prompt)[0][prompt - 1 : -1].log_softmax(-1)
        nats, count = float(logits.gather(1, tokens[prompt:, None]).sum()), len(tokens) - prompt
        assert float(score) == pytest.approx(nats, abs=count * of_nats(model))


def test_reordering_equals_a_cache_of_the_reordered_prompts(tiny_llama):
    model = tiny_llama()
    ag.attach(model, gates_for(model, recent_tokens=4))
    rows, order = [row(30, 1), row(22, 2), row(9, 3)], [2, 0, 0, 1]

    def cache_of(rows):
        batch, cache = left_padded(rows), ag.EvictionCache(model, "gates")
        step(model, cache, *batch.values())
        return cache, batch["attention_mask"]

    (moved, mask), (built, _) = cache_of(rows), cache_of([rows[i] for i in order])
    moved.reorder_cache(torch.tensor(order))
    new = torch.arange(10, 14)[:, None]
    for _ in range(4):
        mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.long)], 1)
        got, want = (step(model, cache, new, mask[order]) for cache in (moved, built))
        hold(got, want, of_logits(model))
    for layer in range(3):
        assert lists(moved.kept_positions(layer)) == lists(built.kept_positions(layer))
    repeated, _ = cache_of(rows)
    repeated.batch_repeat_interleave(2)
    assert lists(repeated.kept_positions(1)) == lists(
        cache_of([r for r in rows for _ in range(2)])[0].kept_positions(1)
    )


def test_chat_turns_on_one_cache(tiny_llama):
    """The first prompt alone is evicted; its answer and the second turn are kept."""
    model = tiny_llama()
    gates = gates_for(model, scope="prompt", recent_tokens=2)
    ag.attach(model, gates)
    cache = ag.EvictionCache(model, "gates")
    first = model.generate(row(26)[None], past_key_values=cache, **GREEDY)
    turn = torch.cat([first, row(8, 9)[None]], 1)
    second = model.generate(turn, past_key_values=cache, **GREEDY)
    assert first[0, 26:].tolist() == by_hand.greedy(model, gates, row(26), 26, 10)
    assert second[0, 44:].tolist() == by_hand.greedy(model, gates, turn[0], 26, 10)
    assert lists(cache.kept_positions(0))[0][0][-27:] == list(range(26, 53))


FRESH = r"for another text call cache.reset\(\) first"


@pytest.mark.parametrize("spec", ["gates", "h2o", "full"])
@pytest.mark.parametrize("length", [4, 26, 35])
def test_another_text_of_no_more_tokens_than_were_seen(tiny_llama, spec, length):
    model = tiny_llama()
    ag.attach(model, gates_for(model, scope="prompt"))
    cache = ag.EvictionCache(model, spec, 8 if spec == "h2o" else None)
    first = model.generate(row(26)[None], past_key_values=cache, **GREEDY)
    assert cache.seen_tokens == first.shape[1] - 1 == 35
    before = lists(cache.kept_positions(0))
    with pytest.raises(UserError, match=f" {length} tokens.* 35: .*{FRESH}"):
        model.generate(row(length, 5)[None], past_key_values=cache, **GREEDY)
    assert lists(cache.kept_positions(0)) == before and cache.seen_tokens == 35
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
    with pytest.raises(UserError, match=f" column {column} .*{FRESH}"):
        model.generate(other, past_key_values=cache, **GREEDY)
    other[0, 35] += 1  # the last generated token, which the cache has not seen, may be another one
    other[0, column] = first[0, column]
    model.generate(other, past_key_values=cache, **GREEDY)


def test_texts_that_go_on(tiny_llama):
    """One token more; after a crop; after a prompt read by hand; with other sequences selected; sampled twice."""
    model = tiny_llama()
    cache = ag.EvictionCache(model, "full")
    options = {"max_new_tokens": 1, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    text = row(12)[None]
    for _ in range(3):
        text = model.generate(text, past_key_values=cache, **options)
    assert (cache.seen_tokens, text.shape[1]) == (14, 15)
    cache.crop(4)
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


def test_forward_passes_by_hand_name_the_way_out(tiny_llama):
    model = tiny_llama()
    cache = ag.EvictionCache(model, "h2o", budget=8)
    model(row(12)[None], past_key_values=cache)
    with pytest.raises(UserError, match=FRESH):
        model(row(9)[None], attention_mask=torch.ones(1, 9), past_key_values=cache)
    with pytest.raises(UserError, match=FRESH):
        model(torch.stack([row(9), row(9)]), past_key_values=cache)


def test_later_turns_of_different_lengths(tiny_llama):
    model = tiny_llama()
    gates = gates_for(model, recent_tokens=6)
    ag.attach(model, gates)
    rows, prompts, new = [row(29, 1), row(18, 2)], [20, 11], [9, 7]
    batch, cache = left_padded([r[:p] for r, p in zip(rows, prompts, strict=True)]), ag.EvictionCache(model, "gates")
    step(model, cache, *batch.values())
    turn = left_padded([r[p:] for r, p in zip(rows, prompts, strict=True)])
    logits = step(model, cache, turn["input_ids"], torch.cat([batch["attention_mask"], turn["attention_mask"]], 1))
    for b, (tokens, prompt) in enumerate(zip(rows, prompts, strict=True)):
        want, flags = by_hand.forward(model, gates, tokens, prompt)
        hold(logits[b, 9 - new[b] :], want[prompt:], of_logits(model))
        columns = (torch.cat([batch["attention_mask"], turn["attention_mask"]], 1)[b]).nonzero().flatten().tolist()
        held = lists(cache.kept_positions(2))[b]
        oracle = [[columns[t] for t in head] for head in by_hand.kept(gates, flags[2], prompt, len(tokens), prompt)]
        assert held == oracle


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_mistral", "tiny_qwen2", "tiny_qwen3"])
def test_full_generates_the_text_of_the_untouched_model(family, request):
    model = request.getfixturevalue(family)()
    batch = left_padded([row(37, 1), row(20, 2)])
    options = GREEDY | {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 20}
    plain = model.generate(**batch, **options)
    served = model.generate(**batch, past_key_values=ag.EvictionCache(model, "full"), **options)
    assert torch.equal(served.sequences, plain.sequences)
    hold(torch.stack(served.logits), torch.stack(plain.logits), of_logits(model))


@pytest.fixture
def tiny_gemma3():
    torch.manual_seed(0)
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=12, layer_types=types, initializer_range=0.15,
        query_pre_attn_scalar=16, eos_token_id=2, bos_token_id=1, pad_token_id=0, attn_logit_softcapping=None,
        final_logit_softcapping=None,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


def test_a_model_with_alternating_windows(tiny_gemma3):
    model, batch = tiny_gemma3, left_padded([row(40, 1), row(23, 2)])
    options = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(**batch, **options)
    served = model.generate(**batch, past_key_values=ag.EvictionCache(model, "full"), **options)
    assert torch.equal(served.sequences, plain.sequences)
    hold(torch.stack(served.logits), torch.stack(plain.logits), of_logits(model))
    gates = gates_for(model, recent_tokens=2)
    assert gates.layer_indices == [1, 3]
    ag.attach(model, gates)
    cache = ag.EvictionCache(model, "gates")
    served = model.generate(**batch, past_key_values=cache, **options)
    for b, prompt in enumerate((40, 23)):
        tokens = served.sequences[b, 40 - prompt :][None]
        gating = ag.Gating(gates, torch.ones_like(tokens), torch.tensor([prompt]))
        with torch.no_grad():
            masked = model(tokens, gating=gating, use_cache=False).logits[0, prompt - 1 : -1]
        hold(torch.stack(served.logits)[:, b], masked, of_logits(model))
        window = [list(range(49 - 12, 49))] * 2  # what the newest query saw
        assert lists(cache.kept_positions(0))[b] == lists(cache.kept_positions(2))[b] == window
        held = [len(head) for layer in (1, 3) for head in cache.kept_positions(layer)[b]]
        premise(all(9 < n < prompt + 9 for n in held), "flags are mixed")


def test_beyond_the_window_of_mistral(tiny_mistral):
    model = tiny_mistral(sliding_window=7)
    gates = gates_for(model, sink_tokens=2, recent_tokens=3)
    ag.attach(model, gates)
    tokens = row(50)
    want, _ = by_hand.forward(model, gates, tokens, 30)
    cache = ag.EvictionCache(model, "gates")
    mask = torch.ones(1, 50, dtype=torch.long)
    got = [step(model, cache, tokens[None, :30], mask[:, :30])[0]]
    got += [step(model, cache, tokens[None, t : t + 1], mask[:, : t + 1])[0] for t in range(30, 50)]
    hold(torch.cat(got)[29:], want[29:], of_logits(model))
    hold(torch.cat(got)[:29], want[:29], of_logits(model))


@pytest.mark.parametrize(("spec", "recent"), [("full", 1), ("gates", 1), ("gates", 6)])
@pytest.mark.parametrize("sign", [1, -1])
def test_crop_takes_back_the_newest_tokens(tiny_llama, spec, recent, sign):
    model = tiny_llama()
    gates = gates_for(model, recent_tokens=recent) if spec == "gates" else gates_for(model, bias=1000.0)
    ag.attach(model, gates)
    tokens, wrong, mask = row(32), row(32, 5), torch.ones(1, 40, dtype=torch.long)
    want, flags = by_hand.forward(model, gates, tokens, 20)
    cache = ag.EvictionCache(model, spec)
    step(model, cache, tokens[None, :20], mask[:, :20])
    step(model, cache, torch.cat([tokens[20:23], wrong[:5]])[None], mask[:, :28])
    cache.crop(sign * 5)
    assert cache.seen_tokens == 23
    assert lists(cache.kept_positions(1))[0] == by_hand.kept(gates, flags[1], 20, 23)
    cache.crop(0)
    got = step(model, cache, tokens[None, 23:], mask[:, :32])
    hold(got[0], want[23:], of_logits(model))


@torch.no_grad()
def test_crop_of_a_padded_batch(tiny_llama):
    """Sequences of different lengths lose the same columns."""
    model, rows = tiny_llama(), [row(30), row(24, 3)]
    batch = left_padded(rows)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache = ag.EvictionCache(model, "full")
    step(model, cache, torch.cat([ids[:, :25], torch.full((2, 4), 7)], 1), mask[:, :29])
    cache.crop(4)
    own = [list(range(25)), list(range(6, 25))]
    assert lists(cache.kept_positions(0)) == [[columns] * 2 for columns in own]
    got = step(model, cache, ids[:, 25:], mask)
    for tokens, logits in zip(rows, got, strict=True):
        hold(logits, model(tokens[None]).logits[0, -5:], of_logits(model))


def test_crop_refuses_what_cannot_come_back(tiny_llama):
    model = tiny_llama()
    ag.attach(model, gates_for(model, recent_tokens=6))
    tokens, mask = row(40)[None], torch.ones(1, 40, dtype=torch.long)
    cache = ag.EvictionCache(model, "gates")
    step(model, cache, tokens[:, :20], mask[:, :20])
    with pytest.raises(UserError, match=r"crop\(-1\): .*prompt"):
        cache.crop(-1)
    for t in range(20, 24):
        step(model, cache, tokens[:, t : t + 1], mask[:, : t + 1])
    with pytest.raises(UserError, match=r"crop\(-3\).*recent"):
        cache.crop(-3)
    for t in range(24, 34):
        step(model, cache, tokens[:, t : t + 1], mask[:, : t + 1])
    cache.crop(-3)
    assert cache.seen_tokens == 31
    full = ag.EvictionCache(model, "full")
    step(model, full, tokens[:, :20], mask[:, :20])
    full.crop(-8)
    with torch.no_grad():
        want = model(tokens[:, :20]).logits
    hold(step(model, full, tokens[:, 12:20], mask[:, :20]), want[:, 12:], of_logits(model))


def test_reset_makes_the_cache_new(tiny_llama):
    model = tiny_llama()
    ag.attach(model, gates_for(model, recent_tokens=3))
    batch, other = left_padded([row(30, 1), row(12, 2)]), row(17, 3)[None]
    cache = ag.EvictionCache(model, "gates")
    model.generate(**batch, past_key_values=cache, **GREEDY)
    cache.reset()
    assert (cache.nbytes, cache.seen_tokens, cache.kept_positions(0)) == (0, 0, [])
    fresh = ag.EvictionCache(model, "gates")
    again = model.generate(other, past_key_values=cache, **GREEDY)
    assert torch.equal(again, model.generate(other, past_key_values=fresh, **GREEDY))
    assert lists(cache.kept_positions(2)) == lists(fresh.kept_positions(2))


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
    with pytest.raises(UserError, match=r"attention_mask \(1, 1, 1, 21\)"):
        model(ids[:, :1], attention_mask=one[None, None], past_key_values=cache)
    assert cache.seen_tokens == 20
    model(ids[:, :1], attention_mask=one, past_key_values=cache)
    assert cache.seen_tokens == 21


def test_gates_of_another_model(tiny_llama, tmp_path):
    gates_for(tiny_llama(num_hidden_layers=2)).save_pretrained(tmp_path / "gates")
    with pytest.raises(UserError, match=r"another model: num_layers 2 .* 3"):
        ag.EvictionCache(tiny_llama(), f"gates:{tmp_path / 'gates'}")


def test_a_detached_model_no_longer_serves_the_cache(tiny_llama):
    model = tiny_llama()
    cache = ag.EvictionCache(model, "full")
    ag.detach(model)
    with pytest.raises(UserError, match="another model.*ag.detach"):
        model(row(9)[None], past_key_values=cache)


def test_a_peft_model_equals_the_merged_one(tiny_llama):
    wrapped = get_peft_model(
        tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    wrapped.eval()
    gates = gates_for(tiny_llama(), recent_tokens=2)
    ag.attach(wrapped, gates)
    batch = left_padded([row(30, 1), row(17, 2)])
    cache = ag.EvictionCache(wrapped, "gates")
    text = wrapped.generate(**batch, past_key_values=cache, **GREEDY)
    ag.detach(wrapped)
    merged = wrapped.merge_and_unload()
    for b, prompt in enumerate((30, 17)):
        tokens = batch["input_ids"][b, 30 - prompt :]
        assert text[b, 30:].tolist() == by_hand.greedy(merged, gates, tokens, prompt, 10)
    assert 0.2 < cache.kept_share() < 0.95


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


def test_an_eager_base_model(tiny_llama):
    texts = []
    for implementation in ("eager", "sdpa"):
        model = tiny_llama(attn_implementation=implementation)
        gates = gates_for(model, first_layer=1)  # the first layer runs the model's own attention
        ag.attach(model, gates)
        cache = ag.EvictionCache(model, "gates")
        texts.append(
            model.generate(**left_padded([row(30), row(21)]), past_key_values=cache, **GREEDY)[:, 30:].tolist()
        )
    assert texts[0] == texts[1] == [by_hand.greedy(model, gates, row(n), n, 10) for n in (30, 21)]


def test_everything_that_generate_can_return(tiny_llama):
    model = tiny_llama(attn_implementation="eager")
    gates = gates_for(model)
    ag.attach(model, gates)
    cache = ag.EvictionCache(model, "gates")
    wanted = ("output_scores", "output_logits", "output_hidden_states", "output_attentions", "return_dict_in_generate")
    out = model.generate(row(30)[None], past_key_values=cache, **GREEDY, **dict.fromkeys(wanted, True))
    assert out.past_key_values is cache
    logits = by_hand.forward(model, gates, out.sequences[0], 30)[0][29:-1]
    hold(torch.cat(out.logits), logits, of_logits(model))
    logits[:, 2] = float("-inf")
    hold(torch.cat(out.scores), logits, of_logits(model))
    assert [len(step) for step in out.hidden_states] == [4] * 10
    assert out.attentions == ((),) * 10  # the cache never builds the matrix


@pytest.mark.parametrize("draft", ["prompt lookup", "assistant"])
def test_drafts(tiny_llama, draft):
    """A full cache takes wrong drafts back."""
    model, ids = tiny_llama(), row(12).repeat(3)[None]
    options = {"prompt_lookup_num_tokens": 3} if draft == "prompt lookup" else {"assistant_model": tiny_llama(seed=1)}
    plain = model.generate(ids, **GREEDY)
    cache, crops = ag.EvictionCache(model, "full"), []
    crop = cache.crop
    cache.crop = lambda n: (crops.append(n), crop(n))
    assert torch.equal(model.generate(ids, past_key_values=cache, **options, **GREEDY), plain)
    assert any(crops), "no draft was wrong"
    assert cache.seen_tokens == 45


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
