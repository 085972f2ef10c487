"""Seconds of an outcome: eviction, question and answer, each once and nothing else, on a clock that scoring moves."""

import copy
import time

import pytest
import torch

import ag
from ag.engine import EvictionCache, read_prompt
from ag.engine.scorers.controls import KNorm
from ag.evaluate.tasks import Sample, make
from ag.evaluate.tasks.follow import feed, score

COPY = 1000.0  # seconds that a copy of a cache takes


@pytest.fixture
def now(monkeypatch):
    """The time in a list: a layer's scores take a second."""
    time_is, scores, deepcopy = [0.0], KNorm.score, copy.deepcopy

    def slow(self, seen):
        time_is[0] += 1
        return scores(self, seen)

    def copied(value, *memo):
        time_is[0] += COPY * isinstance(value, EvictionCache)
        return deepcopy(value, *memo)

    monkeypatch.setattr(KNorm, "score", slow)
    monkeypatch.setattr("copy.deepcopy", copied)
    monkeypatch.setattr(time, "perf_counter", lambda: time_is[0])
    return time_is


@pytest.mark.parametrize("schedule", ["prefill", "steps:2", "every"])
def test_of_an_answer(schedule, now, tiny_llama):
    model, policy = tiny_llama(), ag.policy("knorm", 8, schedule)
    sample = Sample("0", [*range(5, 25)], question=[*range(30, 36)], answers=[[40, 41, 42, 43]])
    [(cache, _)] = read_prompt(model, [policy], torch.tensor([sample.prompt]))
    last = feed(model, cache, torch.tensor([sample.question]))[:, -1]
    score(model, cache, last, sample.answers)
    by_hand = now[0]
    [(_, outcome)] = make("responses").run(model, None, [policy], [sample])
    assert outcome.seconds == by_hand > 0 and now[0] > COPY
    assert (outcome.seconds > 3) == (schedule != "prefill")  # a layer a second


def test_of_turns(now, root, tiny_llama, tiny_tokenizer):
    model, policy = tiny_llama(), ag.policy("knorm", 200, "steps:50")
    task = make("turns", root, lengths=[1500], repeats=1)
    [sample] = task.load(tiny_tokenizer, None, 2000).samples
    [(cache, _)] = read_prompt(model, [policy], torch.tensor([sample.prompt]))
    feed(model, cache, torch.tensor([sample.question[:-1]]))
    by_hand = now[0]
    [(_, outcome)] = task.run(model, tiny_tokenizer, [policy], [sample])
    assert outcome.seconds == by_hand > 3


def test_of_solutions(now, tiny_llama, tiny_tokenizer):
    """Each of the problems of a batch has an equal part."""
    model, policy = tiny_llama(), ag.policy("knorm", 8)
    problems = [Sample(name, [*range(5, 25)], max_new_tokens=4, references=["1"]) for name in "ab"]
    outcomes = [outcome for _, outcome in make("gsm8k").run(model, tiny_tokenizer, [policy], problems)]
    assert [outcome.seconds for outcome in outcomes] == [now[0] / 2] * 2 and now[0] == 3  # a layer a second


def test_of_streams(now, tiny_llama, tiny_tokenizer):
    model, policy = tiny_llama(), ag.policy("knorm", 16, "steps:16")
    book = Sample("0", [*range(5, 37)], answers=[[*range(40, 56)]])
    [(_, outcome)] = make("ppl_stream", block=32, step=16).run(model, tiny_tokenizer, [policy], [book])
    assert outcome.seconds == now[0] == 6  # after the prompt and after the step
