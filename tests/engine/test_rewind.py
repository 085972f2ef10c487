"""A chat whose template writes earlier turns otherwise: going back to where the texts part, or reading anew."""

import copy
import re

import pytest
import torch

import ag
from ag.errors import UserError
from tests.support import ROOT
from tests.support.batches import row
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
