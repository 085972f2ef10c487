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
from ag.model.hybrid import States
from ag.model.interceptor import cache_argument
from ag.model.structure import UnsupportedModelError, decoder_of
from ag.model.support import states_go_on
from tests.engine.test_parity import serve_logits, train_logits
from tests.model.test_architectures import SUMS, text, tiny
from tests.support import batches, served
from tests.support.batches import positions
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

ALL = [
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h", "olmo_hybrid", "granitemoehybrid", "bamba"),
    *("jamba", "falcon_h1", "lfm2", "lfm2_moe", "kimi_linear", "llama4_text", "gemma3n_text", "gemma4_text"),
]
BY_DAY = {"qwen3_5_text", "nemotron_h", "falcon_h1", "lfm2", "gemma4_text", "llama4_text", "jamba"}
IN_TURN = ALL[:12]
#: All types of the table whose layers keep states, those of the newest transformers too.
KEEPING = [*IN_TURN, "lfm3", "bailing_hybrid", "lara_mini"]
FORGETFUL = {"jamba"}  # a pass of several tokens begins with empty states
LENGTHS, NEW = (30, 19), 5
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(Cache, "get_conv_state"), reason="hybrid models need transformers 5.23"),
]


def kinds(names):
    return [pytest.param(x, marks=() if x in BY_DAY else (pytest.mark.slow, pytest.mark.nightly)) for x in names]


def kept(name):
    """A tiny model of a type in KEEPING."""
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"transformers has no {name}")
    return tiny(name)


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
        cache = EvictionCache(model, "full")
        parts = [model(part[None], past_key_values=cache).logits[0] for part in row.split([11, len(row) - 11])]
        assert float((torch.cat(parts) - want).abs().max()) <= bound
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


#: Calls of a batch of two, by which columns of each row are tokens, and how many of the calls read the prompts.
PADDED = {
    "right": ([("1" * 30, "1" * 19 + "0" * 11), ("1", "1")], 1),
    "hole": ([("1" * 30, "000" + "1" * 10 + "00000" + "1" * 9 + "000"), ("1", "1")], 1),
    "turns of three and of one": ([("1" * 30, "0" * 11 + "1" * 19), ("111", "001"), ("111", "100"), ("1", "1")], 1),
    "one row alone, and none": ([("1" * 30, "0" * 11 + "1" * 19), ("1", "0"), ("0", "1"), ("00", "00"), ("1", "1")], 1),
    "a row that begins later": ([("1" * 8, "0" * 8), ("1" * 8, "00000111"), ("1" * 14, "1" * 14), ("1", "1")], 3),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=() if quick else (pytest.mark.slow, pytest.mark.nightly))
        for number, name in enumerate(KEEPING)
        for at, case in enumerate(PADDED)
        for quick in [name in BY_DAY and (at + number) % 3 == 0]
    ],
)
@torch.no_grad()
def test_padding_anywhere_changes_no_row(name, case):
    """Logits, and with eviction the tokens that are held, are those of each row alone."""
    model, (calls, prompt) = kept(name), PADDED[case]
    bound, there = rounding(model), [torch.tensor([[int(x) for x in row] for row in call]) for call in calls]
    mask, sizes = torch.cat(there, 1), [part.shape[1] for part in there]
    texts = [text(int(row.sum()), seed) for seed, row in enumerate(mask)]
    ids = torch.zeros_like(mask).masked_scatter(mask.bool(), torch.cat(texts))
    for policy in (ag.policy("full"), ag.policy("h2o", 12, "every")):
        cache, seen, got = EvictionCache(model, policy), 0, []
        cache.expect(mask[:, : sum(sizes[:prompt])].bool())
        for part in ids.split(sizes, 1):
            seen += part.shape[1]
            got.append(batches.step(model, cache, part, mask[:, :seen]))
        for row, tokens in enumerate(texts):
            each = [int(part[row].sum()) for part in there]
            alone = EvictionCache(model, policy)
            alone.expect(torch.ones(1, sum(each[:prompt]), dtype=torch.bool))
            want = [model(part[None], past_key_values=alone).logits[0] for part in tokens.split([n for n in each if n])]
            mine = torch.cat(got, 1)[row][mask[row].bool()]
            assert float((mine - torch.cat(want)).abs().max()) <= bound
            assert [x.tolist() for x in cache.kept_positions(0)[row]] == [
                x.tolist() for x in alone.kept_positions(0)[0]
            ]
            if policy.budget is None:
                assert float((mine - model(tokens[None], use_cache=False).logits[0]).abs().max()) <= bound


@pytest.mark.parametrize("name", kinds(KEEPING))
@torch.no_grad()
def test_blocks_of_unequal_prompts_are_those_of_each_alone(name):
    model, (ids, mask) = kept(name), padded()
    cache = EvictionCache(model, "h2o", 8, "blocks:8")
    got = batches.step(model, cache, ids, mask)
    for index, row in enumerate(rows()):
        alone = EvictionCache(model, "h2o", 8, "blocks:8")
        want = model(row[None], past_key_values=alone).logits[0]
        assert float((got[index, -len(row) :] - want).abs().max()) <= rounding(model)
        assert [x.tolist() for x in cache.kept_positions(0)[index]] == [x.tolist() for x in alone.kept_positions(0)[0]]


@pytest.mark.parametrize("name", kinds(KEEPING))
@torch.no_grad()
def test_states_go_on_over_the_parts_of_a_text(name):
    """However a text is cut, its logits are those of one pass, in float64, where little hides in rounding."""
    model = kept(name).double()
    row = rows()[0][None]
    want, single = model(row, use_cache=False).logits, kept(name)(row, use_cache=False).logits
    for sizes in ([28, 2], [1, 29], [12, 1, 17], [3, 3, 24]):
        cache = EvictionCache(model, "full")
        got = torch.cat([model(part, past_key_values=cache).logits for part in row.split(sizes, 1)], 1)
        assert float((got - want).abs().max()) <= float((single - want).abs().max())
    assert states_go_on(decoder_of(model)) == (name not in FORGETFUL)


@torch.no_grad()
def test_what_a_model_that_forgets_cannot_do_is_refused():
    model = tiny("jamba")
    with refuses(UserError, "kvzip", "JambaModel", "forget", "another policy"):
        EvictionCache(model, "kvzip", 0.5)
    whole, parts = EvictionCache(model, "h2o", 8), EvictionCache(model, "h2o", 8)
    got = model.generate(rows()[0][None], past_key_values=parts, **words(prefill_chunk_size=7))
    assert torch.equal(got, model.generate(rows()[0][None], past_key_values=whole, **words()))


@pytest.mark.parametrize("name", kinds(KEEPING))
@torch.no_grad()
def test_rows_of_training_are_those_of_each_alone(name):
    """Padding on either side, without an attention mask; rows of several documents are refused."""
    model = kept(name)
    gates = gates_for(model)
    ag.attach(model, gates)
    for side in ("left", "right"):
        batch = batches.padded(rows(), side)
        valid = batch["attention_mask"].bool()
        gating = ag.Gating(gates, valid, torch.tensor(LENGTHS) - 4, open=True)
        places = (valid.cumsum(1) - 1).clamp_min(0)
        got = model(input_ids=batch["input_ids"], position_ids=places, gating=gating, use_cache=False).logits
        for index, row in enumerate(rows()):
            want = model(row[None], use_cache=False).logits[0]
            assert float((got[index, valid[index]] - want).abs().max()) <= rounding(model)
    first = torch.tensor([[0] * 20 + [20] * 10])
    with refuses(UserError, "documents", "packing=split", "cross_documents=true"):
        model(input_ids=rows()[0][None], gating=ag.Gating(None, torch.ones(1, 30), first=first), use_cache=False)


@torch.no_grad()
def test_columns_are_taken_back_where_all_rows_have_as_many_tokens():
    """Two columns of which a row has one token would take its convolutions back too far; later ones do not."""
    model, (ids, mask) = tiny("lfm2"), padded()
    cache = EvictionCache(model, "full")
    cache.activate_past_recording()
    batches.step(model, cache, ids, mask)
    mask = torch.cat([mask, torch.tensor([[1, 1], [0, 1]])], 1)
    batches.step(model, cache, ids[:, :2], mask)
    with refuses(UserError, "crop", "columns of all sequences"):
        cache.crop(-2)
    batches.step(model, cache, text(4, 8).view(2, 2), F.pad(mask, (0, 2), value=1))
    cache.crop(-2)
    last = torch.tensor([[7], [8]])
    got = batches.step(model, cache, last, F.pad(mask, (0, 1), value=1))
    for index, row in enumerate(rows()):
        whole = torch.cat([row, ids[index, :2][mask[index, -2:].bool()], last[index]])
        want = model(whole[None], use_cache=False).logits[0, -1]
        assert float((got[index, -1] - want).abs().max()) <= rounding(model)


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


@torch.no_grad()
def test_states_of_some_sequences_are_copied_without_those_of_the_others(monkeypatch):
    model = tiny("qwen3_5_text")
    cache = EvictionCache(model, "full")
    model(rows()[0].repeat(4, 1), past_key_values=cache)
    states, copies = cache.state.states, []
    own = torch.Tensor.__deepcopy__
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", lambda x, memo: copies.append(x) or own(x, memo))
    before = {name: x.clone() for name, x in states.tensors.items()}
    part = states.at(torch.tensor([2]))
    part.select(torch.tensor([0, 0]))
    assert copies == [] and before.keys() == part.tensors.keys() == states.tensors.keys()
    for name, x in states.tensors.items():
        assert torch.equal(x, before[name]) and torch.equal(part.tensors[name], x[[2, 2]])


@pytest.mark.parametrize("name", kinds(name for name in IN_TURN if name not in FORGETFUL))
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
    shares = name not in FORGETFUL
    served.answers_of_shared_beginnings(model, tiny_tokenizer, ag.policy("h2o", 12), ag.Pool(model, 1 << 21), shares)


@torch.no_grad()
def test_a_batch_may_follow_a_text_that_convolutions_took_back_whole():
    model, (ids, mask) = tiny("lfm2"), padded()
    cache, want = (EvictionCache(model, "full") for _ in range(2))
    cache.activate_past_recording()
    model(ids[:1, :5], past_key_values=cache)
    cache.crop(-5)
    assert torch.equal(*(model(ids, attention_mask=mask, past_key_values=each).logits for each in (cache, want)))
    cache.crop(-3)  # which are recorded still


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
    assert not cache.state.states.recording and cache.state.states.nbytes == plain.state.states.nbytes


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


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_rows_of_training_of_llama4_see_their_chunk_alone(side):
    """Rows with padding, and the documents of a row."""
    model = tiny("llama4_text", attention_chunk_size=12)
    gates = gates_for(model)
    ag.attach(model, gates)
    batch, bound = batches.padded(rows(), side), rounding(model)
    valid = batch["attention_mask"].bool()
    places = (valid.cumsum(1) - 1).clamp_min(0)
    want = [model(row[None], use_cache=False).logits[0] for row in rows()]
    for gating in (ag.Gating(None, valid), ag.Gating(gates, valid, torch.tensor(LENGTHS) - 4, open=True)):
        got = model(input_ids=batch["input_ids"], position_ids=places, gating=gating, use_cache=False).logits
        for index in range(len(LENGTHS)):
            assert float((got[index, valid[index]] - want[index]).abs().max()) <= bound
    packed = torch.cat(rows())[None]
    first = torch.tensor([0] * LENGTHS[0] + [LENGTHS[0]] * LENGTHS[1])[None]
    got = model(input_ids=packed, gating=ag.Gating(None, first=first), use_cache=False).logits
    assert float((got[0] - torch.cat(want)).abs().max()) <= bound


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
        assert all(torch.equal(store.lengths_cpu, store.lengths.cpu()) for store in cache.state.stores)


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
