"""Needles: the same in every run, the answer always in the text, and how answers are graded."""

import itertools
import re

import pytest
from refused import refuses

import ag
from ag.errors import UserError
from ag.evaluate.tasks import GROUPS, make
from ag.evaluate.tasks.needle import FILLER
from ag.evaluate.tasks.needle_kinds import KEYS

BOOKS = [{"text": f"Chapter one. {' '.join(f'This is line {i}, and it is long.' for i in range(400))} The end."}]
KINDS = [*GROUPS["needle"]]


@pytest.fixture
def root(write):
    return write("pg19_style/test", BOOKS)


def load(name, root, tokenizer, limit=None, max_tokens=2000, **options):
    task = make(name, root if name == "needle_text" else None, **{"lengths": [700, 900], "repeats": 2} | options)
    return task, task.load(tokenizer, limit, max_tokens)


@pytest.mark.parametrize("name", KINDS)
def test_the_answer_is_in_the_text_and_every_run_is_the_same(name, root, tiny_tokenizer):
    _, loaded = load(name, root, tiny_tokenizer)
    _, again = load(name, root, tiny_tokenizer)
    _, other = load(name, root, tiny_tokenizer, seed=1)
    assert loaded.samples == again.samples
    assert all(one.text != two.text for one, two in zip(loaded.samples, other.samples, strict=True))
    assert len({sample.id for sample in loaded.samples}) == len(loaded.samples) > 3
    for sample in loaded.samples:
        hay = sample.text.split("\n\n")[1]
        assert all(answer in hay for answer in sample.answers)
        assert len(set(sample.answers)) == len(sample.answers)
        assert sample.prompt == tiny_tokenizer(sample.text)["input_ids"]
        assert sample.tags["length"] - 60 < len(sample.prompt) <= sample.tags["length"]
        assert sample.most >= len(tiny_tokenizer(", ".join(sample.answers))["input_ids"])


@pytest.mark.parametrize("name", ["needle_single", "needle_text", "needle_multikey"])
def test_depth(name, root, tiny_tokenizer):
    _, loaded = load(name, root, tiny_tokenizer, depths=[0, 0.5, 1], repeats=1, lengths=[900])
    for sample, depth in zip(loaded.samples, (0, 0.5, 1), strict=True):
        assert sample.tags["depth"] == depth
        sentences = re.split(r"(?<=[.!?])\s+", sample.text.split("\n\n")[1])
        [place] = [i for i, sentence in enumerate(sentences) if sample.answers[0] in sentence]
        assert place / (len(sentences) - 1) == pytest.approx(depth, abs=0.15)
        assert sum("secret number" in sentence for sentence in sentences) == (4 if name == "needle_multikey" else 1)
        source = (
            [s for row in BOOKS for s in re.split(r"(?<=[.!?])\s+", row["text"])] if name == "needle_text" else FILLER
        )
        rest = [sentence for sentence in sentences if "secret number" not in sentence]
        assert all(sentence in source for sentence in rest)


def test_the_key_that_is_asked_has_the_answer(tiny_tokenizer):
    for sample in load("needle_multikey", None, tiny_tokenizer)[1].samples:
        key = re.search(r"of the (\w+)\?", sample.text)[1]
        assert re.findall(rf"secret number of the {key} is (\d+)", sample.text) == sample.answers
    for sample in load("needle_multivalue", None, tiny_tokenizer, values=3)[1].samples:
        key = re.search(r"of the (\w+)\?", sample.text)[1]
        assert key in KEYS
        assert re.findall(rf"of the {key} is (\d+)", sample.text) == sample.answers
        assert len(sample.answers) == 3


def test_variables_hold_what_is_asked(tiny_tokenizer):
    for sample in load("needle_variables", None, tiny_tokenizer, chains=3, hops=2)[1].samples:
        values = {}
        for name, number, other in re.findall(r"VAR (\w+) = (?:(\d+)|VAR (\w+))\.", sample.text):
            values[name] = number or values[other]  # a variable is set before it is handed on
        asked = re.search(r"have the value (\d+)\?", sample.text)[1]
        assert sorted(sample.answers) == sorted(name for name, value in values.items() if value == asked)
        assert len(values) == 9


def test_grades():
    one, many, names = make("needle_single"), make("needle_multivalue"), make("needle_variables")
    assert one.grade(" 1234567. And 7", ["1234567"]) == 1.0
    assert one.grade(" 7 or 1234567", ["1234567"]) == 0.0
    assert one.grade(" 12345678", ["1234567"]) == 0.0
    assert one.grade(" none", ["1234567"]) == 0.0
    assert many.grade(" 11, 22 and 99, 11", ["11", "22", "33", "44"]) == 0.5
    assert names.grade(" ABCDE, VAR FGHIJ, VAR XXXXX", ["ABCDE", "FGHIJ", "KLMNO"]) == pytest.approx(2 / 3)


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


def test_bad_options(tiny_tokenizer, tmp_path, write):
    with refuses(UserError, "depths=[2]"):
        make("needle_single", depths=[2])
    with refuses(UserError, "keys=100"):
        make("needle_multikey", keys=100)
    with refuses(UserError, "lengths=[]"):
        make("needle_variables", lengths=[])
    with refuses(UserError, "lengths=100"):
        make("needle_single", lengths=[100]).load(tiny_tokenizer, None, 512)
    with refuses(UserError, "root=FOLDER", "pg19_style/test.jsonl"):
        make("needle_text", str(tmp_path)).load(tiny_tokenizer, None, 512)
    with refuses(UserError, "needle_text", str(tmp_path)):
        make("needle_text", write("pg19_style/test", [])).load(tiny_tokenizer, None, 512)


def test_run(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    task, loaded = load("needle_single", None, tiny_tokenizer, lengths=[400], depths=[0.5], repeats=1, max_tokens=512)
    policies = [ag.policy("full"), ag.policy("snapkv", 0.5)]
    outcomes = list(task.run(model, tiny_tokenizer, policies, loaded.samples))
    assert [index for index, _ in outcomes] == [0, 1]
    [sample] = loaded.samples
    for (_, outcome), policy in zip(outcomes, policies, strict=True):
        tokens = model.generate(
            tiny_tokenizer(sample.text, return_tensors="pt")["input_ids"],
            past_key_values=ag.EvictionCache(model, policy),
            max_new_tokens=sample.most,
            do_sample=False,
        )
        answer = tiny_tokenizer.decode(tokens[0, len(sample.prompt) :], skip_special_tokens=True)
        assert outcome.tags == {"length": 400, "depth": 0.5, "repeat": 0, "answer": answer}
        assert outcome.score == 0.0
