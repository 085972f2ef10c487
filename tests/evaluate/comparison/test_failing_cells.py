"""A part of a policy or a task that fails takes its own cell with it, and no other."""

from dataclasses import dataclass

import pytest
import torch

from ag import compare as command
from ag.engine.allocators import ALLOCATORS, Allocator
from ag.engine.scorers import SCORERS
from ag.engine.scorers.controls import KNorm
from ag.engine.wrappers import WRAPPERS, Wrapper
from ag.evaluate import tasks
from ag.evaluate.comparison.compare import compare
from tests.evaluate.conftest import words
from tests.support.refused import names
from tests.support.shapes import shaped

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
    return {
        result.name: None
        if result.summary.problem
        else (
            result.scores,
            [outcome.kept for outcome in result.outcomes],
            [view.kept.tolist() for view in result.views],
        )
        for result in comparison.results
    }


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
        assert (result.summary.mean, result.summary.kept, result.summary.n, result.summary.prefill) == (
            None,
            None,
            0,
            "dense",
        )


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
                raise KeyError("tova")
            yield index, outcome

    monkeypatch.setattr(kind, "run", fail)
    listed = ["full", "tova", "h2o"]
    found = results(compare(config(policies=listed, budgets=[0.5], output=tmp_path / "tova"), quiet))
    assert found == expected | {"tova 0.5": None}
    assert calls == [(listed, every), *(([name], every[3:]) for name in listed)]


def test_a_policy_that_the_model_cannot_have(config, quiet, tiny_tokenizer, tmp_path):
    shaped("deepseek_v3").save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    listed = ["full", "expected_attention", "h2o"]
    comparison = compare(config(model=str(tmp_path / "base"), policies=listed, budgets=[0.5]), quiet)
    [failed] = comparison.failed
    assert (failed.name, failed.summary.prefill) == ("expected_attention 0.5", "")
    names(failed.summary.problem, "DeepseekV3Model", "8", "24")
    assert [result.summary.n for result in comparison.results if result is not failed] == [SAMPLES] * 2


def test_a_task_that_fails(config, quiet, monkeypatch):
    kind = tasks.TASKS["needle_single"][0]

    def read(self, tokenizer, max_tokens):
        raise IndexError("no needle")
        yield

    monkeypatch.setattr(kind, "read", read)
    comparison = compare(config(policies=["full", "h2o"], budgets=[0.5], tasks=["needle_single", "ppl"]), quiet)
    assert [(result.summary.task, result.summary.n) for result in comparison.results] == [
        *[("needle_single", 0)] * 2,
        *[("ppl", SAMPLES)] * 2,
    ]
    assert len(comparison.failed) == 2
    for result in comparison.failed:
        names(result.summary.problem, "IndexError", "no needle", "test_failing_cells.py")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_what_stops_a_program_stops_it(config, quiet, monkeypatch, stop):
    def score(self, seen):
        raise stop

    monkeypatch.setattr(KNorm, "score", score)
    with pytest.raises(stop):
        compare(config(policies=["full", "knorm"], budgets=[0.5]), quiet)


def test_the_command_says_which_failed(settings, parts, tmp_path, capsys):
    told = [*words(settings(tmp_path / "out")), "budgets=[0.5]"]
    assert command.main([*told, "policies=[full,lookup,h2o,h2o@stuck]"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ag.compare: error: ")]
    assert len(lines) == 2
    names(lines[0], "ppl", "lookup 0.5", "KeyError")
    names(lines[1], "ppl", "h2o@stuck 0.5", "ArithmeticError")
    assert command.main([*told, "policies=[full,h2o]"]) == 0
