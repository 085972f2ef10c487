"""A scorer, wrapper, allocator or task that fails takes its own cell with it, and no other."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from ag import compare as command
from ag.engine.allocators import ALLOCATORS, Allocator
from ag.engine.scorers import SCORERS
from ag.engine.scorers.controls import KNorm
from ag.engine.wrappers import WRAPPERS, Wrapper
from ag.evaluate import tasks
from ag.evaluate.comparison import work
from ag.evaluate.comparison.compare import compare
from ag.evaluate.tasks import Outcome
from tests.evaluate.conftest import lines, words
from tests.support.refused import names

SAMPLES = 6
pytestmark = pytest.mark.usefixtures("no_charts")


@dataclass(frozen=True, kw_only=True)
class NotANumber(KNorm):
    """NaN on one token of the layer 1."""

    def score(self, seen):
        score = super().score(seen)
        return score.masked_fill((seen.key_ranks == 20) & (seen.layer == 1), float("nan"))


@dataclass(frozen=True, kw_only=True)
class Lookup(KNorm):
    """Fails at its first observation."""

    def score(self, seen):
        return {}["absent"]


@dataclass(frozen=True, kw_only=True)
class Shapeless(Wrapper):
    """Fails in a function of torch."""

    def score(self, seen):
        return torch.cat([self.inner.score(seen), seen.v[0]])


@dataclass(frozen=True, kw_only=True)
class Stuck(Allocator):
    """Fails when it is asked."""

    def keep(self, layer, candidates, shares):
        raise ArithmeticError("no share\nfor it")


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.setitem(SCORERS, "not_a_number", NotANumber)
    monkeypatch.setitem(SCORERS, "lookup", Lookup)
    monkeypatch.setitem(WRAPPERS, "shapeless", Shapeless)
    monkeypatch.setitem(ALLOCATORS, "stuck", Stuck)


def results(comparison):
    """Scores, kept shares and views by cell; None for one that failed."""
    found = {}
    for result in comparison.results:
        kept = [outcome.kept for outcome in result.outcomes], [view.kept.tolist() for view in result.views]
        found[result.name] = None if result.summary.problem else (result.scores, *kept)
    return found


@pytest.mark.slow
def test_the_others_go_on(config, quiet, parts, tmp_path):
    alone = results(compare(config(policies=["full", "h2o", "tova"], budgets=[0.5]), quiet))
    listed = ["full", "not_a_number", "h2o", "lookup", "h2o+shapeless", "h2o@stuck", "tova"]
    comparison = compare(config(policies=listed, budgets=[0.5], output=tmp_path / "mixed"), quiet)
    found = results(comparison)
    assert {name: found[name] for name in alone} == alone
    problems = {result.name: result.summary.problem for result in comparison.failed}
    assert problems.keys() == found.keys() - alone.keys()
    names(problems["not_a_number 0.5"], "NotANumber.score", "layer 1", "finite")
    names(problems["lookup 0.5"], "KeyError", "'absent'", "test_failing_cells.py")
    names(problems["h2o+shapeless 0.5"], "RuntimeError", "test_failing_cells.py")  # and no file of torch
    names(problems["h2o@stuck 0.5"], "ArithmeticError", "no share for it", "test_failing_cells.py")
    for result in comparison.failed:
        assert (result.summary.mean, result.summary.kept, result.summary.n) == (None, None, 0)
    table = [line for line in (comparison.folder / "table.md").read_text().splitlines() if line.startswith("| ")]
    assert len({line.count("|") for line in table[-len(listed) :]}) == 1  # a failed cell's row is as long as the others


@pytest.mark.slow
def test_samples_that_were_done_are_not_run_again(config, quiet, monkeypatch, tmp_path):
    """Three cells read prompts together until one fails at the fourth; the others go on from there."""
    expected = results(compare(config(policies=["full", "h2o"], budgets=[0.5]), quiet))
    every = list(expected["full"][0])
    kind, calls = tasks.TASKS["ppl"][0], []
    run = kind.run

    def fail(self, model, tokenizer, policies, samples):
        listed = [str(policy.spec) for policy in policies]
        calls.append((listed, [sample.id for sample in samples]))
        for index, outcome in run(self, model, tokenizer, policies, samples):
            if outcome.sample == every[3] and "tova" in listed:
                raise MemoryError("none left")
            yield index, outcome

    listed = ["full", "tova", "h2o"]
    told = config(policies=listed, budgets=[0.5], output=tmp_path / "tova")
    with monkeypatch.context() as patch:
        patch.setattr(kind, "run", fail)
        failed = compare(told, quiet)
    assert results(failed) == expected | {"tova 0.5": None}
    assert failed.failed[0].summary.problem == "out of memory: none left"
    assert calls == [(listed, every), *(([name], every[3:]) for name in listed)]
    assert compare(told, quiet).failed  # it runs again only when that is asked
    told.retry = True
    assert not compare(told, quiet).failed
    assert len(lines(tmp_path / "tova")) == 4  # of a key the last row counts


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 99 bytes"),
    ],
)
def test_what_is_out_of_memory(error):
    assert work._problem(error) == f"out of memory: {error}"


def test_a_task_that_fails(config, quiet, monkeypatch):
    """While it reads, by a score that is no number, and by samples that are all too short."""

    def read(self, tokenizer, max_tokens):
        raise IndexError("no needle")
        yield

    def run(self, model, tokenizer, policies, samples):
        yield 0, Outcome("0", float("nan"), 40, 0.5, 10, 0.0)

    monkeypatch.setattr(tasks.TASKS["needle_single"][0], "read", read)
    comparison = compare(config(policies=["full", "h2o"], budgets=[0.5], tasks=["needle_single", "ppl"]), quiet)
    told = [(result.summary.task, result.summary.n) for result in comparison.results]
    assert told == [("needle_single", 0)] * 2 + [("ppl", SAMPLES)] * 2
    for result in comparison.failed:
        names(result.summary.problem, "IndexError", "no needle", "test_failing_cells.py")
    short = config(policies=["full"], task_options={"ppl": {"prompt": 400, "continuation": 8}})
    row = compare(short, quiet).results[0].summary
    assert row.problem.startswith("no sample can be run") and (row.n, row.too_short) == (0, 7)
    monkeypatch.setattr(tasks.TASKS["ppl"][0], "run", run)
    [result] = compare(config(policies=["full"], samples=1), quiet).results
    assert result.summary.problem == "sample 0 has the score nan."


def test_what_stops_a_program_stops_it():
    worker = SimpleNamespace(progress=SimpleNamespace(begin=lambda *_: None), loaded=SimpleNamespace(samples=[]))

    def stop(*_):
        raise SystemExit

    worker._run = stop
    with pytest.raises(SystemExit):
        work.Worker._attempt(worker, [SimpleNamespace(name="")], [[]])


def test_the_command_says_which_failed(settings, parts, tmp_path, capsys):
    told = [*words(settings(tmp_path / "out")), "budgets=[0.5]"]
    assert command.main([*told, "policies=[full,lookup,h2o,h2o@stuck]"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ag.compare: error: ")]
    assert len(said) == 2
    names(said[0], "ppl", "lookup 0.5", "KeyError")
    names(said[1], "ppl", "h2o@stuck 0.5", "ArithmeticError")
