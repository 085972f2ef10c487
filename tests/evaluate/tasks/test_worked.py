"""Worked problems: batches against one text at a time, kept shares at the end, and grades."""

from dataclasses import replace

import pytest
import torch

import ag
from ag.data.problems import generate
from ag.errors import BudgetWarning
from ag.evaluate.tasks import make
from ag.evaluate.tasks.solutions import Decoded
from tests.support.blocks import slots
from tests.support.gates_for import gates_for

SIZES = {"solution_min": 20, "solution_max": 70}
SHORT = {"solution_min": 20, "solution_max": 40}


def load(tokenizer, limit=5, max_tokens=512, **options):
    task = make("worked", **SIZES | options)
    return task, task.load(tokenizer, limit, max_tokens)


def alone(model, policy, sample):
    """The text that ``model.generate`` gives of one prompt, and its cache."""
    cache = ag.EvictionCache(model, policy)
    tokens = model.generate(
        torch.tensor([sample.prompt]), past_key_values=cache, max_new_tokens=sample.max_new_tokens, do_sample=False
    )
    return tokens[0, len(sample.prompt) :].tolist(), cache


def test_problems_are_of_the_test_split(tiny_tokenizer):
    _, loaded = load(tiny_tokenizer, limit=12)
    assert {sample.parts[0].kind for sample in loaded.samples} == {"addition", "sorting", "variables"}
    for i, sample in enumerate(loaded.samples):
        problem = generate(0, "test", i, 20, 70)
        assert sample.id == f"{problem.kind}-{i}" and sample.parts[0] == problem and problem.answer != ""
        assert tiny_tokenizer.decode(sample.prompt) == problem.prompt
        assert sample.max_new_tokens == len(problem.solution) + 2 + 16  # a space before it, its end, and 16 to spare
    assert load(tiny_tokenizer, limit=12, seed=1)[1] != loaded
    assert {sample.parts[0].kind for sample in load(tiny_tokenizer, kind="sorting")[1].samples} == {"sorting"}
    sizes = [len(sample.prompt) + sample.max_new_tokens for sample in loaded.samples]
    middle = sorted(sizes)[5]
    left = load(tiny_tokenizer, limit=None, max_tokens=middle, problems=12)[1]
    fitting = sum(size <= middle for size in sizes)
    assert (len(left.samples), left.too_long) == (fitting, 12 - fitting) and fitting < 12


@pytest.mark.slow
def test_batches_are_what_each_text_is_alone(tiny_llama, tiny_tokenizer, tmp_path):
    model = tiny_llama()
    gates_for(model, recent_tokens=4).save_pretrained(tmp_path / "export")
    policies = [
        ag.policy("full"),
        ag.policy("streaming_llm", 24, "every"),
        ag.policy("h2o", 20, "steps:3"),
        ag.policy(f"gates:{tmp_path / 'export'}"),
    ]
    task, loaded = load(tiny_tokenizer, limit=3, batch=2, **SHORT)
    samples = [replace(sample, max_new_tokens=9 + number) for number, sample in enumerate(loaded.samples)]
    outcomes = list(task.run(model, tiny_tokenizer, policies, samples))
    for index, policy in enumerate(policies):
        mine = [outcome for at, outcome in outcomes if at == index]
        assert [outcome.sample for outcome in mine] == [sample.id for sample in samples]
        for outcome, sample in zip(mine, samples, strict=True):
            text, cache = alone(model, policy, sample)
            assert outcome.tags["generated"] == len(text)
            assert outcome.tokens == cache.seen_tokens
            assert outcome.kept == pytest.approx(cache.kept_share())
            assert outcome.score == 0.0
    full, streaming = ([o for at, o in outcomes if at == i] for i in (0, 1))
    assert all(outcome.kept == 1.0 for outcome in full)
    for outcome in streaming:
        assert outcome.kept == pytest.approx(24 / outcome.tokens)
        slot = 3 * 2 * (16 * 2 * 4 + 4)  # layers, KV heads; dimensions, keys and values, bytes; a rank
        longest = max(other.tokens for other in streaming)  # a batch's bytes are shared by its tokens
        assert 24 * slot <= outcome.kv_bytes <= slots(longest, 24) * slot


def test_each_text_of_a_batch_says_whether_more_is_protected_than_its_budget(tiny_llama, tiny_tokenizer):
    """Half of the shorter prompts is less than the window, half of the longer ones is not; the last ends first."""
    task, loaded = load(tiny_tokenizer, limit=4, batch=4, **SHORT)
    halves = [len(sample.prompt) // 2 for sample in loaded.samples]
    window = sorted(halves)[2]
    assert min(halves) < window
    samples = [replace(sample, max_new_tokens=4 - number) for number, sample in enumerate(loaded.samples)]
    with pytest.warns(BudgetWarning):
        outcomes = task.run(tiny_llama(), tiny_tokenizer, [ag.policy("snapkv", 0.5, window=window)], samples)
        assert [outcome.over_budget for _, outcome in outcomes] == [half < window for half in halves]


def test_right_answers_count(tiny_llama, tiny_tokenizer, monkeypatch):
    """Of three texts: the right solution, another one's, and half of the right one."""
    task, loaded = load(tiny_tokenizer, limit=3)
    problems = [sample.parts[0] for sample in loaded.samples]
    said = [problems[0].solution, problems[0].solution, problems[2].solution[: len(problems[2].solution) // 2]]
    tokens = [tiny_tokenizer(f" {text}")["input_ids"] for text in said]
    written = [Decoded(text, [1.0], (1, 1.0, 1), False) for text in tokens]
    monkeypatch.setattr("ag.evaluate.tasks.solutions.decode", lambda *_: written)
    outcomes = [one for _, one in task.run(tiny_llama(), tiny_tokenizer, [ag.policy("full")], loaded.samples)]
    assert [outcome.score for outcome in outcomes] == [1.0, 0.0, 0.0]
    assert [outcome.tags["answer"] for outcome in outcomes[:2]] == [problems[0].answer] * 2
    assert [outcome.tags["generated"] for outcome in outcomes] == list(map(len, tokens))
    assert [outcome.tags["kind"] for outcome in outcomes] == [problem.kind for problem in problems]
