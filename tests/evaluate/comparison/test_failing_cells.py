"""A scorer, wrapper or task that fails takes its own cell with it, and no other."""

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from rich.console import Console

from ag.compare import main
from ag.engine.scorers import SCORERS
from ag.engine.scorers.controls import KNorm
from ag.engine.wrappers import WRAPPERS, Wrapper
from ag.errors import UserError
from ag.evaluate import tasks
from ag.evaluate.comparison import work
from ag.evaluate.comparison.compare import compare
from ag.evaluate.comparison.folder import Folder, tag_values
from ag.evaluate.tasks import Outcome, Sample
from tests.evaluate.conftest import lines, without_charts, words
from tests.support.full_disk import full_disk
from tests.support.refused import names, refuses

SAMPLES = 6
pytestmark = pytest.mark.usefixtures("no_charts")


@dataclass(frozen=True, kw_only=True)
class Lookup(KNorm):
    """Fails at its first observation."""

    def score(self, seen):
        return {}["absent"]


@dataclass(frozen=True, kw_only=True)
class Shapeless(Wrapper):
    """Fails in a function of torch."""

    def score(self, inputs):
        return torch.cat([self.inner.score(inputs), torch.zeros(1)])


def results(comparison):
    """Scores, kept shares and views by cell; None for one that failed."""
    found = {}
    for result in comparison.results:
        _, outcomes, views = comparison.cells[result.key]
        kept = [outcome.kept for outcome in outcomes], [view.kept.tolist() for view in views]
        found[result.name] = None if result.problem else (tag_values(outcomes), *kept)
    return found


@pytest.fixture(scope="module")
def alone(settings, tmp_path_factory):
    """The results of two policies on which nothing fails."""
    with pytest.MonkeyPatch.context() as patch:
        without_charts(patch)
        config = settings(tmp_path_factory.mktemp("alone"), policies=["full", "h2o"], budgets=[0.5])
        return results(compare(config, Console(quiet=True)))


@pytest.mark.slow
def test_the_others_go_on(config, quiet, alone, monkeypatch, capsys):
    monkeypatch.setitem(SCORERS, "lookup", Lookup)
    monkeypatch.setitem(WRAPPERS, "shapeless", Shapeless)
    listed = "[full,lookup,h2o,h2o+shapeless]"
    assert main([*words(config()), "budgets=[0.5]", f"policies={listed}"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ag.compare: error: ")]
    names(said[0], "ppl", "lookup 0.5", "KeyError", "'absent'", "test_failing_cells.py")
    names(said[1], "ppl", "h2o+shapeless 0.5", "RuntimeError", "test_failing_cells.py")  # and no file of torch
    comparison = compare(config(budgets=[0.5], policies=listed[1:-1].split(",")), quiet)
    assert results(comparison) == alone | {"lookup 0.5": None, "h2o+shapeless 0.5": None} and len(said) == 2
    for result in comparison.failed:
        assert math.isnan(result.mean) and math.isnan(result.kept) and result.n == 0
    table = [line for line in (comparison.folder / "table.md").read_text().splitlines() if line.startswith("| ")]
    assert len({line.count("|") for line in table[-4:]}) == 1  # a failed cell's row is as long as the others


@pytest.mark.slow
def test_samples_that_were_done_are_not_run_again(config, quiet, alone, monkeypatch):
    """Three cells read prompts together until one fails at the fourth; the others go on from there."""
    every = list(alone["full"][0])
    kind, calls = tasks.TASKS["ppl"][0], []
    run = kind.run

    def record(self, model, tokenizer, policies, samples):
        calls.append(([str(policy.spec) for policy in policies], [sample.id for sample in samples]))
        return run(self, model, tokenizer, policies, samples)

    def fail(self, model, tokenizer, policies, samples):
        for index, outcome in record(self, model, tokenizer, policies, samples):
            if outcome.sample == every[3] and "tova" in calls[-1][0]:
                raise MemoryError("none left")
            yield index, outcome

    listed = ["full", "tova", "h2o"]
    given = config(policies=listed, budgets=[0.5])
    with monkeypatch.context() as patch:
        patch.setattr(kind, "run", fail)
        failed = compare(given, quiet)
    assert results(failed) == alone | {"tova 0.5": None}
    assert failed.failed[0].problem == "out of memory: none left"
    assert calls == [(listed, every), *(([name], every[3:]) for name in listed)]
    assert compare(given, quiet).failed  # a failed cell runs again only with retry=true
    given.retry = True
    calls.clear()
    monkeypatch.setattr(kind, "run", record)
    assert not compare(given, quiet).failed
    assert calls == [(["tova"], every[3:])]
    assert len(lines(given.output)) == 4  # of a key the last row counts
    assert not list((failed.folder / "unfinished").iterdir())


def test_a_full_disk_is_no_result(config, quiet, alone, monkeypatch):
    """The command ends, and the next one goes on where the disk was full."""
    add, times = Folder.add, []

    def fail(self, key, outcome):
        times.append(key)
        if len(times) == 4:
            with full_disk(0):
                add(self, key, outcome)
        add(self, key, outcome)

    given = config(policies=["full", "h2o"], budgets=[0.5])
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "add", fail)
        with refuses(UserError, f"output={given.output}", "File too large", "the same command"):
            compare(given, quiet)
    assert results(compare(given, quiet)) == alone


@pytest.mark.parametrize("change", [None, "data", "cells"])
def test_a_killed_command_goes_on_with_the_next_sample(
    config, quiet, alone, monkeypatch, tiny_folder, tmp_path, change
):
    """Unless the data has changed. A new cell first runs alone on the samples that the others have done."""
    corpus = tmp_path / "corpus" / "test.jsonl"
    corpus.parent.mkdir()
    corpus.write_bytes((tiny_folder / "corpus" / "test.jsonl").read_bytes())
    every, kind, calls = list(alone["full"][0]), tasks.TASKS["ppl"][0], []
    run, dies = kind.run, [True]

    def die(self, model, tokenizer, policies, samples):
        calls.append((len(policies), [sample.id for sample in samples]))
        for index, outcome in run(self, model, tokenizer, policies, samples):
            if outcome.sample == every[3] and index == 1 and dies:
                raise KeyboardInterrupt  # as a kill: the fourth sample of the first cell is in the folder
            yield index, outcome

    monkeypatch.setattr(kind, "run", die)
    given = config(policies=["full", "h2o"], budgets=[0.5], root=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        compare(given, quiet)
    dies.clear()
    if change == "data":
        corpus.write_text(corpus.read_text().replace("a", "b"))
    if change == "cells":
        given.policies.append("knorm")
    comparison = compare(given, quiet)
    after_the_kill = {
        None: [(1, every[3:4]), (2, every[4:])],
        "data": [(2, every)],
        "cells": [(1, every[:3]), (2, every[3:4]), (3, every[4:])],
    }
    assert calls == [(2, every), *after_the_kill[change]]
    assert not list((comparison.folder / "unfinished").iterdir())
    if change != "data":
        assert {name: results(comparison)[name] for name in alone} == alone


def test_a_batch_is_run_as_a_whole(config, quiet, tmp_path, monkeypatch):
    """Its solutions are written together, so that half of a batch would write others."""
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(5)]
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind, calls, kills = tasks.TASKS["gsm8k_nats"][0], [], [True]
    run = kind.run

    def die(self, model, tokenizer, policies, samples):
        calls.append([sample.id for sample in samples])
        for index, outcome in run(self, model, tokenizer, policies, samples):
            yield index, outcome
            if outcome.sample == "2" and kills:
                raise KeyboardInterrupt

    monkeypatch.setattr(kind, "run", die)
    options = {"gsm8k_nats": {"max_new_tokens": 3, "batch": 2}}
    given = config(policies=["full"], tasks=["gsm8k_nats"], task_options=options, root=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        compare(given, quiet)
    kills.clear()
    [row] = compare(given, quiet).results
    assert calls == [["0", "1", "2", "3", "4"], ["2", "3", "4"]] and row.n == 5


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 99 bytes"),
    ],
)
def test_errors_of_memory(error):
    assert work._problem(error) == f"out of memory: {error}"


def test_what_a_task_of_a_plugin_may_return(config, quiet, monkeypatch):
    """Truth values are numbers, which a second run reads; other values and ids that come twice are refused."""

    def run(self, model, tokenizer, policies, samples):
        for sample in samples:
            yield 0, Outcome(sample.id, True, 40, 0.5, 10, 0.0, tags)

    def read_twice(*given):
        for sample in read(*given):
            yield replace(sample, id="a") if isinstance(sample, Sample) else sample

    ppl, read, tags = tasks.TASKS["ppl"][0], tasks.TASKS["ppl"][0].read, {"right": True, "nats": np.float32(0.5)}
    monkeypatch.setattr(ppl, "run", run)
    settings = config(policies=["full"], samples=2)
    [row] = compare(settings, quiet).results
    assert (row.mean, row.nats, row.n) == (1.0, 0.5, 2)
    with monkeypatch.context() as patch:
        patch.setattr(work.Worker, "run", None)
        assert compare(settings, quiet).results[0].mean == 1.0
    tags = {"right": None}
    [row] = compare(config(policies=["full"], samples=2, output=f"{settings.output}/1"), quiet).results
    names(row.problem, "has the right None: expected a number or a text")
    monkeypatch.setattr(ppl, "read", read_twice)
    with pytest.raises(UserError) as refused:
        compare(config(policies=["full"], samples=2, output=f"{settings.output}/2"), quiet)
    names(str(refused.value), "task ppl: 2 samples have the id 'a'", "expected one each")


def test_a_task_that_fails(config, quiet, monkeypatch):
    """While it reads, by a score or a tag that is no number, and by samples that are all too short."""

    def read(self, tokenizer, max_tokens):
        raise IndexError("no needle")
        yield

    def run(self, model, tokenizer, policies, samples):
        yield 0, outcomes.pop()

    monkeypatch.setattr(tasks.TASKS["needle_single"][0], "read", read)
    comparison = compare(config(policies=["full", "h2o"], budgets=[0.5], tasks=["needle_single", "ppl"]), quiet)
    counts = [(result.task, result.n) for result in comparison.results]
    assert counts == [("needle_single", 0)] * 2 + [("ppl", SAMPLES)] * 2
    for result in comparison.failed:
        names(result.problem, "IndexError", "no needle", "test_failing_cells.py")
    short = config(policies=["full"], task_options={"ppl": {"prompt": 400, "continuation": 8}})
    row = compare(short, quiet).results[0]
    assert row.problem.startswith("no sample can be run") and (row.n, row.too_short) == (0, 7)
    monkeypatch.setattr(tasks.TASKS["ppl"][0], "run", run)
    for name, score, tags in (("kl inf", 1.0, {"nats": 1.0, "kl": float("inf")}), ("score nan", float("nan"), {})):
        outcomes = [Outcome("0", score, 40, 0.5, 10, 0.0, tags)]
        [result] = compare(config(policies=["full"], samples=1, output=f"{config().output}/{name}"), quiet).results
        names(result.problem, f"sample 0 has the {name}: expected a finite number", "dtype=float32")
