"""Needles: the same in every run, the answer always in the text, and how answers are graded."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch

import ag
from ag.errors import UserError
from ag.evaluate.tasks import GROUPS, make
from ag.evaluate.tasks.generated import NOISE
from ag.evaluate.tasks.words import NOUNS
from tests.evaluate.tasks.conftest import BOOK
from tests.support.refused import refuses

SENTENCES = re.split(r"(?<=[.!?])\s+", BOOK)
KINDS = [*GROUPS["needle"], *GROUPS["needle_books"], "passkey", *(x for x in GROUPS["ruler"] if x.startswith("niah"))]


def load(name, root, tokenizer, limit=None, max_tokens=2000, **options):
    task = make(name, root, **{"lengths": [900, 1100], "repeats": 2} | options)
    return task, task.load(tokenizer, limit, max_tokens)


@pytest.mark.parametrize("name", KINDS)
def test_the_answer_is_in_the_text_and_every_run_is_the_same(name, root, tiny_tokenizer):
    task, loaded = load(name, root, tiny_tokenizer)
    _, again = load(name, root, tiny_tokenizer)
    _, other = load(name, root, tiny_tokenizer, seed=1)
    assert loaded.samples == again.samples
    assert all(one.text != two.text for one, two in zip(loaded.samples, other.samples, strict=True))
    assert len({sample.id for sample in loaded.samples}) == len(loaded.samples) > 3
    for sample in loaded.samples:
        context, question = (tiny_tokenizer.decode(ids) for ids in (sample.prompt, sample.question))
        assert context + question == sample.text
        assert question.startswith("\n\nQuestion: ") and "Question: " not in context
        assert all(answer in context and answer not in question[12:] for answer in sample.references)
        assert len(set(sample.references)) == len(sample.references)
        assert tiny_tokenizer.decode(sample.right[0]) == " " + ", ".join(sample.references)
        room = sample.tags["length"] - (task.generate or 0)
        unit = 130 if name == "niah_multikey_3" else 62  # the longest sentence
        assert room - unit < len(sample.prompt + sample.question) <= room
        assert sample.most == (task.generate or len(sample.right[0]) + 8)


@pytest.mark.parametrize("name", ["needle_single", "needle_text", "needle_multikey"])
def test_depth(name, root, tiny_tokenizer):
    _, loaded = load(name, root, tiny_tokenizer, depths=[0, 0.5, 1], repeats=1, lengths=[900])
    for sample, depth in zip(loaded.samples, (0, 0.5, 1), strict=True):
        assert sample.tags["depth"] == depth
        sentences = re.split(r"(?<=[.!?])\s+", sample.text.split("\n\n")[1])
        [place] = [i for i, sentence in enumerate(sentences) if sample.references[0] in sentence]
        assert abs(place - depth * (len(sentences) - 1)) <= 2  # the text is cut to sentences, before and behind it
        assert sum("secret number" in sentence for sentence in sentences) == (4 if name == "needle_multikey" else 1)
        rest = [sentence for sentence in sentences if "secret number" not in sentence]
        assert all(sentence in (SENTENCES if name == "needle_text" else NOISE) for sentence in rest)


def test_samples_of_books_begin_anywhere(root, tiny_tokenizer):
    _, loaded = load("needle_books_4", root, tiny_tokenizer, lengths=[900], repeats=8)
    first = [re.search(r"This is line (\d+)", sample.text)[1] for sample in loaded.samples]
    assert len(set(first)) > 5
    for sample in loaded.samples:
        assert len(re.findall(r"The secret number of the \w+ is \d{5}\.", sample.text)) == 4
        assert "hidden" not in sample.text


def test_the_key_that_is_asked_has_the_answer(root, tiny_tokenizer):
    for sample in load("needle_multikey", None, tiny_tokenizer)[1].samples:
        key = re.search(r"of the (\w+)\?", sample.text)[1]
        assert re.findall(rf"secret number of the {key} is (\d+)", sample.text) == sample.references
    for sample in load("needle_multivalue", None, tiny_tokenizer, values=3)[1].samples:
        key = re.search(r"of the (\w+)\?", sample.text)[1]
        assert key in NOUNS
        assert sorted(re.findall(rf"of the {key} is (\d+)", sample.text)) == sorted(sample.references)
        assert len(sample.references) == 3
    for sample in load("niah_multiquery", root, tiny_tokenizer)[1].samples:
        keys = re.findall(r"the (\w+-\w+)", sample.text.split("Question: ")[1].split("?")[0])
        found = dict(re.findall(r"number of the (\S+) is (\d{7})\.", sample.text))
        assert [found[key] for key in keys] == sample.references and len(keys) == 4
    for sample in load("niah_multikey_3", root, tiny_tokenizer)[1].samples:
        key = re.search(r"of the (\S+)\?", sample.text)[1]
        pairs = re.findall(r"^The secret code of the (\S+) is (\S+)\.$", sample.text, re.M)
        assert len(pairs) > 4
        assert [value for one, value in pairs if one == key] == sample.references


def test_variables_hold_what_is_asked(tiny_tokenizer):
    for name, options in (("needle_variables", {"chains": 3, "hops": 2}), ("vt", {"lengths": [2600]})):
        for sample in load(name, None, tiny_tokenizer, max_tokens=9000, **options)[1].samples:
            text = sample.text.split("Keep track of them.")[-1]
            values = {}
            for variable, number, other in re.findall(r"VAR (\w{5}) = (?:(\d+)|VAR (\w+))\.", text):
                values[variable] = number or values[other]  # a variable is set before it is handed on
            asked = re.findall(r"have the value (\d+)\?", text)[-1]
            assert sorted(sample.references) == sorted(name for name, value in values.items() if value == asked)
            assert len(values) == (9 if name == "needle_variables" else 5)


def test_the_example_of_variables_is_solved(tiny_tokenizer):
    [sample] = load("vt", None, tiny_tokenizer, lengths=[2600], repeats=1, max_tokens=9000)[1].samples
    example = sample.text.split("\n\nThe following text sets")[0]
    assert 0.7 * 650 < len(example) <= 650  # a quarter of the length
    first = re.findall(r"VAR (\w{3}) = \d{5}\.", example)
    chain = first + re.findall(r"VAR (\w{3}) = VAR", example)
    assert example.endswith("they are: " + ", ".join(chain)) and len(chain) == 5


def test_grades():
    def grade(task, text, *references):
        return task.grade(text, SimpleNamespace(references=list(references)))

    one, many, names = make("needle_single"), make("needle_multivalue"), make("needle_variables")
    assert grade(one, " 1234567. And 7", "1234567") == 1.0
    assert grade(one, " 7 or 1234567", "1234567") == 0.0
    assert grade(one, " 12345678", "1234567") == 0.0
    assert grade(one, " none", "1234567") == 0.0
    assert grade(many, " 11, 22 and 99, 11", "11", "22", "33", "44") == 0.5
    assert grade(many, " Ab\x07Cd", "abcd") == 0.0
    assert grade(many, " ABCD", "abcd") == 1.0
    assert grade(names, " ABCDE, VAR FGHIJ, VAR XXXXX", "ABCDE", "FGHIJ", "KLMNO") == pytest.approx(2 / 3)


def test_grid_limit_and_what_is_too_long(tiny_tokenizer):
    """A limit cuts repeats before lengths and depths."""
    options = {"lengths": [600, 800], "depths": [0, 1], "repeats": 3}
    everything = load("needle_single", None, tiny_tokenizer, **options)[1].samples
    cells = [(s.tags["repeat"], s.tags["length"], s.tags["depth"]) for s in everything]
    assert cells == [(r, *cell) for r, cell in itertools.product(range(3), itertools.product([600, 800], [0, 1]))]
    assert load("needle_single", None, tiny_tokenizer, limit=4, **options)[1].samples == everything[:4]
    loaded = load("needle_single", None, tiny_tokenizer, max_tokens=700, **options)[1]
    assert loaded.too_long == 6
    short = [sample for sample in everything if sample.tags["length"] == 600]
    assert loaded.samples == short
    loaded = load("needle_single", None, tiny_tokenizer, limit=3, max_tokens=700, **options)[1]
    assert (loaded.samples, loaded.too_long) == (short[:3], 2)


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("needle_single", {"depths": [2]}, ("depths=[2]", "shares")),
        ("needle_multikey", {"keys": 1000}, ("keys=1000", "1 to 240")),
        ("niah_multiquery", {"queries": 5}, ("queries=5", "1 to keys=4")),
        ("needle_single", {"values": 2}, ("values=2", "1")),
        ("niah_single_1", {"haystack": "essay"}, ("haystack='essay'", "noise, text, needles")),
        ("needle_variables", {"lengths": []}, ("lengths=[]",)),
        ("needle_single", {"question": "later"}, ("question='later'", "after or before")),
        ("needle_single", {"lengths": [100]}, ("lengths=100",)),
        ("niah_single_1", {"lengths": [300]}, ("lengths=300", "128 tokens")),
        ("needle_text", {"root": "here"}, ("root=FOLDER", "pg19_style/test.jsonl")),
        ("needle_text", {}, ("needle_text", "has no text")),
    ],
)
def test_bad_options(name, options, parts, tiny_tokenizer, write):
    root = write("pg19_style/test", [])
    with refuses(UserError, *parts):
        make(name, **{"root": root} | options).load(tiny_tokenizer, None, 512)


@pytest.mark.parametrize("question", ["after", "before"])
@torch.no_grad()
def test_run(tiny_llama, tiny_tokenizer, question):
    """What is generated is what plain generation gives that reads the prompt, and then the question as a later turn."""
    model = tiny_llama()
    options = {"lengths": [400], "depths": [0.5], "repeats": 1, "max_tokens": 512, "question": question}
    task, loaded = load("needle_single", None, tiny_tokenizer, **options)
    policies = [ag.policy("full"), ag.policy("snapkv", 0.5)]
    outcomes = list(task.run(model, tiny_tokenizer, policies, loaded.samples))
    assert [index for index, _ in outcomes] == [0, 1]
    [sample] = loaded.samples
    whole = tiny_tokenizer(sample.text, return_tensors="pt")["input_ids"]
    for (_, outcome), policy in zip(outcomes, policies, strict=True):
        cache = ag.EvictionCache(model, policy)
        if question == "after":
            model(whole[:, : len(sample.prompt)], past_key_values=cache)
            assert outcome.kept == pytest.approx(cache.kept_share())
        most = {"max_new_tokens": sample.most, "do_sample": False}
        tokens = model.generate(whole, past_key_values=cache, **most)
        answer = tiny_tokenizer.decode(tokens[0, whole.shape[1] :], skip_special_tokens=True)
        tags = {"length": 400, "depth": 0.5, "repeat": 0, "question": question, "answer": answer}
        assert outcome.tags | tags == outcome.tags
        assert outcome.tags.keys() - tags.keys() == {"nats", "hits", "kl", "same_top1"}
        assert outcome.score == 0.0
        assert outcome.tokens == len(sample.prompt)
