"""Multiple choice against the plain model, and what is read."""

import random

import pytest

import ag
from ag.data.sources import DataError
from ag.evaluate.tasks import make
from tests.support.refused import refuses

rng = random.Random(0)
WORDS = ("red", "blue", "cat", "dog", "runs", "sleeps", "7", "a", "stone", "under", "moon")


def words(most):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


PIQA = [{"goal": words(12), "sol1": words(6), "sol2": words(6), "label": i % 2} for i in range(16)]


@pytest.mark.slow
def test_a_full_cache_is_the_plain_model(tiny_llama, tiny_tokenizer, write, plain):
    model = tiny_llama()
    task = make("piqa", write("piqa/validation", PIQA))
    loaded = task.load(tiny_tokenizer, None, 512)
    outcomes = [outcome for _, outcome in task.run(model, tiny_tokenizer, [ag.policy("full")], loaded.samples)]
    right, normalised = [], []
    for row, sample in zip(PIQA, loaded.samples, strict=True):
        prompt = tiny_tokenizer(f"Goal: {row['goal']}\nSolution:")["input_ids"]
        sums = [float(plain(model, prompt, tiny_tokenizer(f" {row[x]}")["input_ids"]).sum()) for x in ("sol1", "sol2")]
        right.append(float((sums[1] > sums[0]) == row["label"]))
        normalised.append(float((sums[1] / len(row["sol2"]) > sums[0] / len(row["sol1"])) == row["label"]))
        assert sample.prompt == prompt
    assert [outcome.score for outcome in outcomes] == right
    assert [outcome.tags["normalised"] for outcome in outcomes] == normalised
    assert 0 < sum(right) < len(right) and right != normalised
    assert [outcome.sample for outcome in outcomes] == [f"validation-{i}" for i in range(16)]
    assert [(one.tokens, one.kept) for one in outcomes] == [(len(sample.prompt), 1.0) for sample in loaded.samples]


def test_the_test_split_is_read_where_it_has_labels(tiny_tokenizer, write):
    row = {"question": "Why?", "choices": {"text": ["a", "b", "c"], "label": ["A", "B", "C"]}, "answerKey": "C"}
    write("arc_challenge/validation", [row])
    [first, _] = make("arc_c", write("arc_challenge/test", [row, row])).load(tiny_tokenizer, None, 512).samples
    assert (first.tags, first.target, len(first.answers)) == ({"split": "test"}, 2, 3)
    write("piqa/test", PIQA)
    assert len(make("piqa", write("piqa/validation", PIQA[:3])).load(tiny_tokenizer, None, 512).samples) == 3


def test_missing_data(tiny_tokenizer, tmp_path, write):
    for root in (str(tmp_path), write("rte/train", [{}])):
        with refuses(DataError, "rte", "root=FOLDER", "rte/validation.jsonl", "load_dataset('aps/super_glue'"):
            make("rte", root).load(tiny_tokenizer, None, 512)
