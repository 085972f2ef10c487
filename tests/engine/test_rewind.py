"""A chat whose template writes earlier turns otherwise: going back to where the texts part, or reading anew."""

import copy
import re

import pytest
import torch
from transformers import DynamicCache

import ag
from ag.engine.decode import decode
from ag.errors import UserError
from tests.support import ROOT
from tests.support.batches import row
from tests.support.gates_for import gates_for
from tests.support.http_server import VOCABULARY, byte_tokenizer
from tests.support.reasoning import TEMPLATE
from tests.support.refused import refuses

QUESTIONS = ("Does it rain in the town by the river today?", "And snow?", "Is it windy?")
NEW = 6


@pytest.fixture
def chat(tiny_llama):
    """A model, and the ids of each turn, whose thoughts are dropped once the next question comes."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE

    def turns(**variables):
        messages, texts = [], []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            told = {"add_generation_prompt": True, "return_tensors": "pt", **variables}
            texts.append(tokenizer.apply_chat_template(messages, **told)["input_ids"])
            messages.append({"role": "assistant", "reasoning_content": "Let me see.", "content": "No."})
        return texts

    return tiny_llama(vocab_size=VOCABULARY).eval(), turns


def generate(model, ids, cache):
    return model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)


def alike(one, other):
    """How many tokens two texts begin with alike."""
    least = min(one.shape[1], other.shape[1])
    same = one[0, :least] == other[0, :least]
    return least if bool(same.all()) else int((~same).long().argmax())


def test_turns_go_on_from_where_the_texts_part(chat):
    """Each answer is that of a cache that read the first prompt and then the rest of the new text."""
    (model, turns), policy = chat, ag.policy("snapkv@pyramid", 0.5, window=8)
    cache, whole = ag.EvictionCache(model, policy), None
    texts = turns()
    for ids in texts:
        held = cache.rewind(ids)
        # the last token of an answer was never read
        expected = 0 if whole is None else min(alike(whole[:, :-1], ids), ids.shape[1] - 1)
        assert held == expected and cache.seen_tokens == held
        assert whole is None or held >= texts[0].shape[1]
        oracle = ag.EvictionCache(model, policy)
        if whole is not None:
            with torch.no_grad():
                model(texts[0], past_key_values=oracle)
        whole = generate(model, ids, cache)
        assert torch.equal(whole, generate(model, ids, oracle))
        assert cache.kept_positions(0)[0][0].tolist() == oracle.kept_positions(0)[0][0].tolist()


@pytest.mark.parametrize(
    ("variables", "policy", "told", "held"),
    [
        ({}, "h2o", {"budget": 20, "schedule": "every"}, 0),  # what went while it wrote does not come back
        ({"enable_thinking": False}, "full", {}, len("<think></think>")),  # the texts part within the prompt
    ],
    ids=["every", "in the prompt"],
)
def test_a_text_that_cannot_go_on_is_read_anew(chat, variables, policy, told, held):
    model, turns = chat
    cache = ag.EvictionCache(model, policy, **told)
    first, second, _ = turns(**variables)
    generate(model, first, cache)
    assert cache.rewind(second) == (first.shape[1] - held if held else 0)
    assert torch.equal(generate(model, second, cache), generate(model, second, ag.EvictionCache(model, policy, **told)))


def test_the_example_of_the_page(chat):
    """Every question is answered as by a cache of its own."""
    model, _ = chat
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "caches.md").read_text(), re.DOTALL)
    [code] = [block for block in blocks if "rewind" in block]
    names = {"model": model, "tokenizer": tokenizer, "cache": ag.EvictionCache(model, "full")}
    exec(compile(code, "caches.md", "exec"), names)
    assert [message["role"] for message in names["chat"]] == ["user", "assistant"] * 2 + ["user"]
    inputs = names["inputs"]
    alone = model.generate(**inputs, past_key_values=ag.EvictionCache(model, "full"), max_new_tokens=40)
    assert torch.equal(names["output"], alone)


@pytest.mark.parametrize("back", [0, 4])
@torch.no_grad()
def test_ids_end_where_a_text_was_read_by_other_means(tiny_llama, back):
    """Tokens that were cropped, or read by other means in the place of generated ones, are not compared."""
    model, prompt = tiny_llama(), row(12)[None]
    cache = ag.EvictionCache(model, "full")
    out = generate(model, prompt, cache)
    if back:
        cache.crop(-back)
    before = cache.seen_tokens
    other = (out[:, before : before + 1] - 2) % 125 + 3  # than was generated there
    turn = torch.cat([other, row(4)[None]], 1)
    model(turn, past_key_values=cache)
    whole = torch.cat([out[:, :before], turn, row(2)[None]], 1)
    assert torch.equal(generate(model, whole, copy.deepcopy(cache)), generate(model, whole, None))
    again = torch.cat([out, row(6)[None]], 1)
    assert cache.rewind(again) == before
    assert torch.equal(generate(model, again, cache), generate(model, again, None))


@torch.no_grad()
def test_a_text_after_beams_is_read_anew(tiny_llama):
    """The answers come in the order of their scores, and the cache has them in the order of the search."""
    model, prompt = tiny_llama(), row(12)[None]
    cache = ag.EvictionCache(model, "full")
    arguments = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3, "num_return_sequences": 3}
    answers = model.generate(prompt, past_key_values=cache, **arguments)
    turns = torch.cat([answers, row(4).expand(3, -1)], 1)
    with refuses(UserError, "order of beams", "cache.reset()"):
        generate(model, turns, cache)
    with refuses(UserError, "order of beams", "cache.reset()"):  # new tokens alone, with the mask of the whole text
        mask = torch.ones(3, cache.seen_tokens + 4)
        model.generate(turns[:, -4:], attention_mask=mask, past_key_values=cache, max_new_tokens=NEW)
    assert cache.rewind(turns) == 0
    assert torch.equal(generate(model, turns, cache), generate(model, turns, None))


@torch.no_grad()
def test_one_of_several_answers_goes_on(tiny_llama):
    model, prompt = tiny_llama(), row(12)[None]
    cache = ag.EvictionCache(model, "full")
    torch.manual_seed(0)
    arguments = {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 3}
    answers = model.generate(prompt, past_key_values=cache, **arguments)
    cache.remove([0, 2])
    turn = torch.cat([answers[1:2], row(4)[None]], 1)
    assert torch.equal(generate(model, turn, cache), generate(model, turn, None))


class Stop(Exception):
    """Raised by a streamer."""


class StoppingStreamer:
    """Raises at a call."""

    def __init__(self, at):
        self.left = at

    def put(self, tokens):
        self.left -= 1
        if not self.left:
            raise Stop

    def end(self):
        """Do nothing."""


@torch.no_grad()
def test_an_answer_that_was_broken_off_is_not_continued_unseen(tiny_llama):
    """Its tokens were read and are not known: a text that only shares the prompt would be continued after them."""
    model, prompt = tiny_llama(), row(12)[None]
    cache = ag.EvictionCache(model, "full")
    with pytest.raises(Stop):
        model.generate(prompt, past_key_values=cache, max_new_tokens=8, do_sample=False, streamer=StoppingStreamer(5))
    assert cache.seen_tokens > prompt.shape[1] and not cache.state.pass_open
    turn = torch.cat([prompt, row(9)[None]], 1)
    with refuses(UserError, f"first {prompt.shape[1]} are known", "cache.rewind(input_ids)", "cache.reset()"):
        generate(model, turn, cache)
    assert cache.rewind(turn) == prompt.shape[1]
    whole = generate(model, turn, cache)
    assert torch.equal(whole, generate(model, turn, None))
    more = torch.cat([whole, row(3)[None]], 1)
    assert torch.equal(generate(model, more, cache), generate(model, more, None))


@torch.no_grad()
def test_another_text_after_several_answers_is_refused(tiny_llama):
    model, prompt = tiny_llama(), row(12)[None]
    cache = ag.EvictionCache(model, "full")
    torch.manual_seed(0)
    answers = model.generate(
        prompt, past_key_values=cache, max_new_tokens=8, do_sample=True, num_return_sequences=2, pad_token_id=0
    )
    other = (torch.cat([answers, answers[:, :5]], 1) + 1) % 125
    with refuses(UserError, "differ", "from column 0 on", "cache.reset()"):
        generate(model, other, cache)
    assert cache.rewind(torch.cat([answers, row(2).expand(2, -1)], 1)) == cache.seen_tokens > prompt.shape[1]


@torch.no_grad()
def test_the_order_of_beams_is_not_forgotten(tiny_llama, tmp_path):
    """By a saved cache, by sequences that were cropped apart, and by a cache that took them in."""
    model, prompt = tiny_llama(), row(12)[None]
    pool = ag.Pool(model, 2**22)
    beams, added = (ag.EvictionCache(model, "full", pool=pool) for _ in range(2))
    arguments = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3, "num_return_sequences": 3}
    model.generate(prompt, past_key_values=beams, **arguments)
    beams.save(tmp_path / "cache")
    loaded = ag.EvictionCache.load(tmp_path / "cache", model)
    cropped, added_to = copy.deepcopy(beams), added
    cropped.crop([1, 1, 0])
    model(row(12)[None], past_key_values=added_to)
    added_to.add(copy.deepcopy(beams))
    for cache in (loaded, cropped, added_to):
        new = row(4).expand(len(cache.valid), -1)
        mask = torch.cat([cache.valid, torch.ones_like(new, dtype=torch.bool)], 1)
        with refuses(UserError, "order of beams", "cache.reset()"):
            model.generate(new, attention_mask=mask, past_key_values=cache, max_new_tokens=NEW)


@torch.no_grad()
def test_what_is_protected_stays_protected_where_a_text_is_read_anew(tiny_llama):
    """As in a loop of turns that begins by going back, with a cache that has read nothing."""
    model, prompt = tiny_llama(), row(30)[None]
    cache = ag.EvictionCache(model, "h2o", 6)
    cache.protect([(0, 5)])
    for ids in (prompt, row(40)[None]):
        assert cache.rewind(ids) == 0
        generate(model, ids, cache)
        assert {*range(5)} <= {*cache.kept_positions(0)[0][0].tolist()}


@torch.no_grad()
def test_flags_decide_on_a_prompt_as_a_whole(tiny_llama):
    """Going back into a prompt that is still complete would read the rest of another one without gates."""
    model = tiny_llama().requires_grad_(False)
    ag.attach(model, gates_for(model, recent_tokens=16))
    first = row(12)[None]
    second = torch.cat([first[:, :8], row(120)[None]], 1)
    cache, fresh = ag.EvictionCache(model, "flags"), ag.EvictionCache(model, "flags")
    generate(model, first, cache)
    assert cache.rewind(second) == 0
    assert torch.equal(generate(model, second, cache), generate(model, second, fresh))
    assert cache.kept_share() == fresh.kept_share() < 1


@torch.no_grad()
def test_a_cache_that_was_cropped_to_nothing_knows_no_text(tiny_llama):
    """What is read next by the model itself is not taken for the text before."""
    model, prompt = tiny_llama(), row(12)[None]
    cache = ag.EvictionCache(model, "full")
    whole = generate(model, prompt, cache)
    cache.crop(-cache.seen_tokens)
    model(row(20, 4)[None], past_key_values=cache)
    turn = torch.cat([whole, row(4)[None]], 1)
    assert cache.rewind(turn) == 0
    assert torch.equal(generate(model, turn, cache), generate(model, turn, None))


def test_a_text_of_inference_mode_goes_back_outside_of_it(tiny_llama):
    model, prompt = tiny_llama(), row(12)[None]
    caches = [ag.EvictionCache(model, "full") for _ in range(2)]
    for cache in caches:
        with torch.inference_mode():
            whole = model.generate(prompt, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    turn = torch.cat([whole[:, :-3], row(4)[None]], 1)
    assert caches[0].rewind(turn) == whole.shape[1] - 3
    caches[1].crop(whole.shape[1] - 3 - caches[1].seen_tokens)
    for cache in caches:
        assert not cache.state.pass_open
        with torch.inference_mode():
            got = model.generate(turn, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
            assert torch.equal(got, generate(model, turn, None))


@pytest.mark.parametrize("arguments", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}])
@torch.no_grad()
def test_a_text_that_was_read_once_has_several_answers(tiny_llama, arguments):
    """As in transformers' own cache; another text is refused."""
    model, context = tiny_llama(), row(12)[None]
    ids = torch.cat([context, row(5, 3)[None]], 1)
    cache, plain = ag.EvictionCache(model, "full"), DynamicCache()
    for each in (cache, plain):
        model.generate(context, past_key_values=each, max_new_tokens=1, do_sample=False)
        each.batch_repeat_interleave(3)
    told = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | arguments
    with refuses(UserError, "differ"):
        model.generate((ids + 1) % 125, past_key_values=cache, **told)
    answers = []
    for each in (cache, plain):
        torch.manual_seed(0)
        answers.append(model.generate(ids, past_key_values=each, **told))
    assert torch.equal(*answers)


def test_the_own_decoding_refuses_a_prompt_in_parts(tiny_llama):
    model, prompt = tiny_llama(), row(12)[None]
    with refuses(UserError, "prefill_chunk_size", "leave custom_generate out"):
        model.generate(
            prompt,
            past_key_values=ag.EvictionCache(model, "full"),
            custom_generate=decode,
            max_new_tokens=2,
            prefill_chunk_size=4,
        )
