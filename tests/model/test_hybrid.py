"""Models with layers that do not attend beside layers that do, and other layers of this year's models."""

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, MambaConfig
from transformers.cache_utils import Cache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import ag
from ag import EvictionCache
from ag.engine import read_prompt
from ag.errors import UserError
from ag.gates.attach import attached_gates
from ag.model.hooks import cache_argument
from ag.model.hybrid import States
from ag.model.structure import UnsupportedModelError
from tests.engine.test_parity import serve_logits, train_logits
from tests.model.test_architectures import SUMS, text, tiny
from tests.support import batches, served
from tests.support.batches import positions
from tests.support.gates_for import gates_for

ALL = [
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h", "olmo_hybrid", "granitemoehybrid", "bamba"),
    *("jamba", "falcon_h1", "lfm2", "lfm2_moe", "kimi_linear", "llama4_text", "gemma3n_text", "gemma4_text"),
]
BY_DAY = {"qwen3_5_text", "nemotron_h", "falcon_h1", "lfm2", "gemma4_text", "llama4_text"}
IN_TURN = ALL[:12]
LENGTHS, NEW = (30, 19), 5
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(Cache, "get_conv_state"), reason="hybrid models need transformers 5.23"),
]


def kinds(names):
    return [pytest.param(x, marks=() if x in BY_DAY else (pytest.mark.slow, pytest.mark.nightly)) for x in names]


def rows():
    return [text(length, seed) for seed, length in enumerate(LENGTHS)]


def padded():
    """Return ids and mask ``[2, 30]`` of two texts, padded on the left."""
    width = max(LENGTHS)
    ids = torch.stack([F.pad(row, (width - len(row), 0)) for row in rows()])
    mask = torch.stack([F.pad(torch.ones(len(row)), (width - len(row), 0)) for row in rows()]).long()
    return ids, mask


def words(**more):
    return {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **more}


def rounding(model):
    """What orders of summation may change of a model's logits: its own distance from float64, several times."""
    row = rows()[0][None]
    exact = copy.deepcopy(model).double()(row, use_cache=False).logits
    return SUMS * float((model(row, use_cache=False).logits - exact).abs().max())


@pytest.mark.parametrize("name", kinds(ALL))
@torch.no_grad()
def test_full_is_the_model_alone_padded_in_chunks_and_over_turns(name):
    model = tiny(name)
    bound = min(rounding(model), 1e-5)
    ids, mask = padded()
    for index, row in enumerate(rows()):
        want = model(row[None], use_cache=False).logits[0]
        cache, own = EvictionCache(model, "full"), DynamicCache(config=model.config)
        parts = zip(row.split([11, len(row) - 11]), torch.arange(len(row)).split([11, len(row) - 11]), strict=True)
        for part, at in parts:  # Jamba's own parts differ from the whole by more than rounding
            chunk = model(part[None], position_ids=at[None], **{cache_argument(type(model)): own}).logits
            assert float((model(part[None], past_key_values=cache).logits - chunk).abs().max()) <= bound
        places = (mask.cumsum(1) - 1).clamp_min(0)
        both = model(ids, attention_mask=mask, position_ids=places, past_key_values=EvictionCache(model, "full")).logits
        assert float((both[index, -len(row) :] - want).abs().max()) <= bound
    for chunk in (None, 8):
        cache = EvictionCache(model, "full")
        more = {} if chunk is None else {"prefill_chunk_size": chunk}
        got = model.generate(ids, attention_mask=mask, past_key_values=cache, **words(**more))
        assert torch.equal(got, model.generate(ids, attention_mask=mask, **words()))
        turn, longer = torch.cat([got, text(14, 9).view(2, 7)], 1), F.pad(mask, (0, NEW + 7), value=1)
        again = model.generate(turn, attention_mask=longer, past_key_values=cache, **words())
        assert torch.equal(again, model.generate(turn, attention_mask=longer, **words()))


@pytest.mark.parametrize("name", kinds(name for name in IN_TURN if name not in ("falcon_h1", "kimi_linear")))
@torch.no_grad()
def test_what_is_evicted_is_what_the_attention_does_not_see(name):
    """The one layer that attends, under a mask, in the model of transformers with its own cache."""
    model, row = tiny(name), rows()[0][None]
    cache = EvictionCache(model, "h2o@heads", 0.4)
    model(row, past_key_values=cache)
    own = DynamicCache(config=model.config)
    called = cache_argument(type(model))
    places = torch.arange(LENGTHS[0] + 4)[None]  # which Bamba's default takes from a layer that counts nothing
    model(row, position_ids=places[:, : LENGTHS[0]], **{called: own})
    config = model.config
    held = torch.zeros(config.num_key_value_heads, row.shape[1], dtype=torch.bool)
    for head, kept in enumerate(cache.kept_positions(0)[0]):
        held[head, kept] = True
    assert 0 < held.float().mean() < 0.5
    seen = held.repeat_interleave(config.num_attention_heads // len(held), 0)[None, :, None]
    for token, place in zip(text(4, 5).view(4, 1, 1), places[0, LENGTHS[0] :], strict=True):
        seen = F.pad(seen, (0, 1), value=True)
        mask = {"full_attention": torch.where(seen, 0.0, -torch.inf), "linear_attention": None, "conv": None}
        want = model(token, attention_mask=mask, position_ids=place[None, None], **{called: own}).logits
        got = model(token, past_key_values=cache).logits
        assert float((got - want).abs().max()) <= rounding(model)


@pytest.mark.parametrize("name", kinds(ALL))
@torch.no_grad()
def test_sequences_come_and_go(name):
    """Selected, forked, removed and added sequences go on as each alone does."""
    model, token = tiny(name), torch.tensor([[7]])
    pool = ag.Pool(model, 1 << 22)
    alone = []
    for row in rows():
        cache = EvictionCache(model, "h2o", 8, pool=pool)
        model(row[None], past_key_values=cache)
        alone.append((cache, model(token, past_key_values=copy.deepcopy(cache)).logits[0, -1]))
    both = EvictionCache(model, "h2o", 8, pool=pool)
    for cache, _ in alone:
        both.add(copy.deepcopy(cache))
    both.batch_select_indices([1, 0, 1])
    both.remove([2])
    places = torch.tensor([[LENGTHS[1]], [LENGTHS[0]]])
    mask = F.pad(both.valid.long(), (0, 1), value=1)
    got = model(token.expand(2, 1), attention_mask=mask, position_ids=places, past_key_values=both).logits[:, -1]
    for row, (_, want) in zip(got, reversed(alone), strict=True):
        assert float((row - want).abs().max()) <= rounding(model)


@pytest.mark.parametrize("name", kinds(IN_TURN))
@torch.no_grad()
def test_a_prompt_is_read_once_for_many_policies_and_repeated_for_kvzip(name):
    model = tiny(name)
    ids, mask = padded()
    policies = [ag.policy("full"), ag.policy("kvzip", 0.5), ag.policy("kvzip", 1.0), ag.policy("h2o", 0.5)]
    token, longer = torch.tensor([[5], [6]]), F.pad(mask, (0, 1), value=1)
    steps = {}
    for policy, (cache, _) in zip(policies, read_prompt(model, policies, ids, mask), strict=True):
        single = EvictionCache(model, policy)
        model(ids, attention_mask=mask, past_key_values=single)
        assert [*map(len, cache.kept_positions(0)[1])] == [*map(len, single.kept_positions(0)[1])]
        steps[policy], want = (
            model(token, attention_mask=longer, past_key_values=one).logits for one in (cache, single)
        )
        assert float((steps[policy] - want).abs().max()) <= rounding(model)
    assert float((steps[policies[2]] - steps[policies[0]]).abs().max()) <= rounding(model)  # nothing was evicted


@pytest.mark.slow
@pytest.mark.parametrize("prefill", ["sparse", "dense"])
@pytest.mark.parametrize("name", kinds(ALL))
def test_served_logits_are_the_trained_ones(name, prefill):
    """Masks in training, right padded, against physical eviction, left padded; for Llama in tests/engine."""
    model, prompts = tiny(name), (30, 23)
    ag.attach(model, gates_for(model, recent_tokens=4, sink_tokens=2, prefill=prefill))
    texts = [batches.row(prompt + 8, prompt) for prompt in prompts]
    trained = train_logits(model, attached_gates(model), texts, prompts)
    served, cache = serve_logits(model, texts, prompts)
    for got, want in zip(served, trained, strict=True):
        assert float((got - want).abs().max()) <= rounding(model)
    assert 0.2 < cache.kept_share() < 0.98, "the flags are not mixed: the test shows nothing"


@pytest.mark.parametrize("name", kinds(IN_TURN))
def test_answers_of_a_server_are_those_of_each_request_alone(name, tiny_tokenizer):
    model = tiny(name)
    served.answers_of_shared_beginnings(model, tiny_tokenizer, ag.policy("h2o", 12), ag.Pool(model, 1 << 21))


@pytest.mark.parametrize("name", kinds(["lfm2", "lfm2_moe", "lfm3"]))
@torch.no_grad()
def test_convolutions_take_drafts_back(name, tmp_path):
    """Alone and in a padded batch, from a short prompt on; later turns and saved caches hold no more than before."""
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"transformers has no {name}")
    model, (ids, mask), taken = tiny(name), padded(), []
    for first, valid in ((ids[:1, :1], mask[:1, :1]), (ids[:1], mask[:1]), (ids, mask)):
        drafts, caches = text(5, 7).expand(len(first), -1), [EvictionCache(model, "full") for _ in range(2)]
        caches[0].activate_past_recording()
        for cache, tokens in zip(caches, (drafts, drafts[:, :2]), strict=True):
            longer = F.pad(valid, (0, tokens.shape[1]), value=1)
            model(first, attention_mask=valid, past_key_values=cache)
            places = positions(longer, tokens.shape[1])
            model(tokens, attention_mask=longer, position_ids=places, past_key_values=cache)
        caches[0].crop(-3)
        caches[0].save(tmp_path / "cache")
        caches += [EvictionCache.load(tmp_path / "cache", model), copy.deepcopy(caches[0])]
        longer = F.pad(valid, (0, 3), value=1)
        options = {"attention_mask": longer, "position_ids": positions(longer, 1)}
        got, *others = (model(drafts[:, :1], past_key_values=cache, **options).logits for cache in caches)
        assert all(float((other - got).abs().max()) <= rounding(model) for other in others)
    row = torch.cat([rows()[0], rows()[0][4:12]])[None]
    cache, plain = EvictionCache(model, "h2o", 24), EvictionCache(model, "h2o", 24)
    with pytest.MonkeyPatch.context() as patch:
        crop = States.crop
        patch.setattr(States, "crop", lambda states, columns=0: (taken.append(columns), crop(states, columns)))
        got = model.generate(row, past_key_values=cache, prompt_lookup_num_tokens=3, **words())
    assert any(taken) and torch.equal(got, model.generate(row, past_key_values=plain, **words()))
    turn = torch.cat([got, row[:, :9]], 1)
    assert torch.equal(*(model.generate(turn, past_key_values=one, **words()) for one in (cache, plain)))
    assert not cache.states.recording and cache.states.nbytes == plain.states.nbytes


@pytest.mark.parametrize(("name", "why"), [("qwen3_5_text", "cannot go back"), ("lfm2", "activate_past_recording")])
@torch.no_grad()
def test_what_states_cannot_do_is_refused_and_nothing_changes(name, why):
    model, row = tiny(name), rows()[0][None]
    cache = EvictionCache(model, "full")
    model(row, past_key_values=cache)
    want = model(row[:, :1], past_key_values=copy.deepcopy(cache)).logits
    for crop in (-3, [3]):
        with pytest.raises(UserError, match=why):
            cache.crop(crop)
    if name == "qwen3_5_text":
        with pytest.raises(UserError, match=why):
            cache.activate_past_recording()
    ids, mask = padded()
    blocks = EvictionCache(model, "h2o", 8, "blocks:8")
    with pytest.raises(UserError, match="blocks of sequences with padding end at different columns"):
        model(ids, attention_mask=mask, past_key_values=blocks)
    model(row, past_key_values=blocks)
    assert len(blocks.kept_positions(0)[0][0]) == 8
    assert torch.equal(model(row[:, :1], past_key_values=cache).logits, want)
    assert "states of layers that do not attend" in str(cache.report())


def test_models_without_attention_or_with_a_cache_of_their_own_are_refused():
    mamba = AutoModelForCausalLM.from_config(MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32))
    with pytest.raises(UnsupportedModelError, match="no layer that attends"):
        EvictionCache(mamba, "full")
    with pytest.raises(UnsupportedModelError, match="MiniMaxCache"):
        EvictionCache(tiny("minimax"), "full")


def test_transformers_whose_layers_reach_into_the_cache_is_refused(monkeypatch):
    model = tiny("lfm2")
    monkeypatch.delattr(Cache, "get_conv_state")
    with pytest.raises(UnsupportedModelError, match="expected 5.23 or newer"):
        EvictionCache(model, "full")


def test_a_layer_of_an_unknown_type_is_refused():
    model = tiny("llama")
    model.config.layer_types = ["full_attention", "dreams"]
    with pytest.raises(UserError, match="no cache of transformers has layers of the type 'dreams'"):
        EvictionCache(model, "full")


@torch.no_grad()
def test_chunks_of_llama4_end_where_the_model_ends_them():
    """Within a prompt, in a batch whose sequences cross at different steps, and over an eviction."""
    model = tiny("llama4_text", attention_chunk_size=16)
    bound = rounding(model)
    ids, mask = padded()
    cache = EvictionCache(model, "full")
    got = model.generate(ids, attention_mask=mask, past_key_values=cache, **words(max_new_tokens=20))
    assert torch.equal(got, model.generate(ids, attention_mask=mask, **words(max_new_tokens=20)))
    row, whole = rows()[0][None], EvictionCache(model, "h2o", 0.5)
    model(row, past_key_values=whole)
    parts = EvictionCache(model, "h2o", 0.5)
    model.generate(row, past_key_values=parts, **words(prefill_chunk_size=7, max_new_tokens=1, min_new_tokens=1))
    assert [x.tolist() for x in whole.kept_positions(1)[0]] == [x.tolist() for x in parts.kept_positions(1)[0]]
    assert [len(x) for x in whole.kept_positions(0)[0]] == [30 - 16] * 2
    steps = [model(torch.tensor([[5]]), past_key_values=one).logits for one in (whole, parts)]
    assert float((steps[0] - steps[1]).abs().max()) <= bound


@pytest.mark.parametrize("spec", ["full", "snapkv", "kvzip"])
@torch.no_grad()
def test_queries_of_llama4_see_their_chunk_alone_where_scorers_look_back(spec):
    model = tiny("llama4_text", attention_chunk_size=12)
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(1))
    cache = EvictionCache(model, spec, None if spec == "full" else 14)
    found = model(ids, past_key_values=cache).logits
    assert float((found - model(ids, use_cache=False).logits).abs().max()) <= rounding(model)


@torch.no_grad()
def test_counts_of_llama4_behind_the_border_of_a_chunk():
    """The host counts what the device holds, though some layers remove a chunk within a counted step."""
    model = tiny("llama4_text", attention_chunk_size=12)
    cache = EvictionCache(model, "tova", 14, "every")
    model(rows()[0][None], past_key_values=cache)
    for token in range(8):
        model(torch.tensor([[5 + token]]), past_key_values=cache)
        assert all(torch.equal(store.held, store.lengths.cpu()) for store in cache.stores)


@torch.no_grad()
def test_a_loaded_cache_of_llama4_counts_as_the_saved_one(tmp_path):
    """Where a chunk has just ended, no later query sees its tokens."""
    model = tiny("llama4_text", attention_chunk_size=12)
    cache = EvictionCache(model, "full")
    model(rows()[0][None, :24], past_key_values=cache)
    cache.save(tmp_path / "c")
    loaded = EvictionCache.load(tmp_path / "c", model)
    assert loaded.kept_share() == cache.kept_share() == 0.5 and str(loaded.report()) == str(cache.report())


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
@torch.no_grad()
def test_shared_keys_are_read_before_they_go(name):
    """A prompt in chunks is a whole one under eviction too: the later layers of its last chunk see what it saw."""
    model, row = tiny(name), rows()[0][None]
    logits = []
    for sizes in ([30], [11, 19], [29, 1]):
        cache = EvictionCache(model, "h2o", 8)
        cache.expect(torch.ones(1, 30, dtype=torch.bool))
        for part in row.split(sizes, 1):
            last = model(part, past_key_values=cache).logits[:, -1]
        logits.append(torch.stack([last, model(torch.tensor([[5]]), past_key_values=cache).logits[:, -1]]))
    for other in logits[1:]:
        assert float((other - logits[0]).abs().max()) <= rounding(model)
