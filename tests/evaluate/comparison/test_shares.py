"""Which results hold equally much: kept shares worked out by hand, and the pairs that follow from them."""

from dataclasses import replace
from pathlib import Path

import pytest

from ag.config.spec import PolicySpec
from ag.evaluate.comparison import charts
from ag.evaluate.comparison.page import render, wins
from ag.evaluate.comparison.result import (
    Comparison,
    Result,
    at_budget,
    kept_shares_text,
    percent,
    same_kept_share,
    shares_agree,
    uncompared_results,
)
from ag.evaluate.comparison.tables import markdown
from ag.evaluate.comparison.verdict import find_verdict
from ag.evaluate.tasks import Outcome
from tests.support import made_up

LENGTHS = (100, 300)
SPECS = {name: PolicySpec.parse(f"{name}:x") for name in ("flags", "gates")}
SPECS |= {"mine": SPECS["gates"], "fitting": SPECS["flags"]}


def result(label, budget, tokens, kept, task="ppl"):
    """A result on prompts of these tokens with these kept shares; nats are the share evicted."""
    made = made_up.result("ppl", label, budget, 0.0, 0)
    outcomes = [
        Outcome(str(i), 3.0 - share + 0.001 * i, n, share, 9, 0.1)
        for i, (n, share) in enumerate(zip(tokens, kept, strict=True))
    ]
    total = sum(n * share for n, share in zip(tokens, kept, strict=True)) / sum(tokens)
    mean = sum(one.score for one in outcomes) / len(outcomes)
    summary = replace(made.summary, task=task, kept=total, mean=mean, n=len(outcomes), floor=None)
    return Result(summary, outcomes, [], SPECS.get(label) or PolicySpec(label))


def of(results, baseline="full"):
    return Comparison.tested(Path(), baseline, results)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (0.25, 0.27, True),
        (0.25, 0.271, False),
        (0.05, 0.06, True),
        (0.05, 0.0601, False),
        (0.004, 0.008, False),  # 16 and 32 of 4,096 tokens: twice the memory, half a percent of the prompt
        (0.0, 0.0, True),
    ],
)
def test_shares_that_count_as_equal(one, other, same):
    assert shares_agree(one, other) is shares_agree(other, one) is same


@pytest.mark.parametrize(
    ("budget", "flags", "alike"),
    [
        (60, (0.3, 0.3), False),  # 120 of 400 tokens too, but 40 % of a prompt on average
        (60, (0.6, 0.2), True),
        (0.3, (0.3, 0.3), True),
        (0.3, (0.35, 0.3), False),  # 31 % of all tokens, 32.5 % of a prompt
    ],
)
def test_of_all_tokens_and_of_a_prompt_on_average(budget, flags, alike):
    """Budgets in tokens are different shares of prompts of different lengths: 60 tokens of 100 and of 300."""
    kept = [budget / n for n in LENGTHS] if isinstance(budget, int) else [budget] * 2
    one, other = result("h2o", budget, LENGTHS, kept), result("flags", None, LENGTHS, flags)
    assert same_kept_share(one, other) is same_kept_share(other, one) is alike
    if not alike and budget == 60:
        assert uncompared_results(of([one, other])) == ["ppl: flags keeps 30.0 % of a prompt on average, h2o 60 40.0 %"]


def test_texts_that_the_model_writes_differ_in_length():
    """70 tokens held behind solutions of 200 and of 230 tokens are the same memory, 110 are not."""
    one, other = result("h2o", 70, (200, 200), (0.35, 0.35)), result("tova", 70, (230, 230), (70 / 230, 70 / 230))
    assert not shares_agree(0.35, 70 / 230)
    assert same_kept_share(one, other) and same_kept_share(other, one)
    assert not same_kept_share(one, result("tova", 70, (230, 230), (110 / 230, 110 / 230)))


@pytest.fixture
def mixed():
    """At a quarter: gates, h2o, and snapkv, which protects more; flags that hold 63 %, and others that hold 26 %."""
    shares = {"mine": 0.25, "h2o": 0.25, "snapkv": 0.32}
    results = [result("full", None, LENGTHS, (1.0, 1.0))]
    results += [result(label, 0.25, LENGTHS, (share, share)) for label, share in shares.items()]
    results += [result(label, None, LENGTHS, (s, s)) for label, s in (("flags", 0.63), ("fitting", 0.26))]
    return results


def test_unequal_shares_are_never_paired(mixed, no_charts):
    comparison = of(mixed)
    assert [one.summary.label for one in at_budget(comparison.results, "0.25")] == ["mine", "h2o", "fitting"]
    pairs = wins(comparison, "0.25")
    assert pairs.names == ["full (100 %)", "mine 0.25 (25 %)", "h2o 0.25 (25 %)", "fitting (26 %)"]
    assert pairs.tasks.tolist() == [[1] * 4] * 4
    verdict = find_verdict(comparison, "ppl", "0.25")
    assert (verdict.best.summary.label, verdict.rival.summary.label) == ("fitting", "h2o")
    assert uncompared_results(comparison) == [
        "ppl: snapkv 0.25 keeps 32.0 %, mine 0.25 25.0 %",
        "ppl: flags keeps 63.0 %, mine 0.25 25.0 %",
    ]
    for text in (render(comparison), markdown(comparison)):
        assert all(line in text for line in uncompared_results(comparison))
    assert [one.summary.label for one in comparison.results if one.paired is None] == ["full"]
    without = find_verdict(of([one for one in mixed if one.budget == ""]), "ppl", "")
    assert (without.best.summary.label, without.rival.summary.label) == ("flags", "full")
    assert "level" not in str(without)  # gates that hold different shares are neither rivals nor level


def test_a_baseline_that_evicts_is_for_those_that_hold_as_much(mixed):
    comparison = of(mixed, "flags")
    assert [one.summary.label for one in comparison.results if one.paired] == ["full"]
    assert "ppl: h2o 0.25 keeps 25.0 %, flags 63.0 %" in uncompared_results(comparison)
    near = of(mixed, "fitting")
    assert near.results[2].paired.difference == pytest.approx(0.01) and near.results[3].paired is None
    same = of([*mixed, result("tova", 0.5, LENGTHS, (0.5, 0.5)), result("h2o", 0.5, LENGTHS, (0.5, 0.5))], "h2o")
    assert [one.name for one in same.results if one.paired] == ["mine 0.25", "tova 0.5"]  # at the same budget


def test_pairs_differ_between_tasks(mixed):
    """Flags that hold as much as the others on one of two tasks are paired in that task alone."""
    fits = [result(label, budget, LENGTHS, (0.25, 0.25), "other") for label, budget in (("h2o", 0.25), ("flags", None))]
    pairs = wins(of([*mixed, *fits]), "0.25")
    at = {name.split()[0]: place for place, name in enumerate(pairs.names)}
    assert (pairs.tasks[at["h2o"], at["flags"]], pairs.tasks[at["h2o"], at["mine"]]) == (1, 1)
    assert pairs.tasks[at["mine"], at["flags"]] == 0


def test_shares_as_text():
    assert [percent(share) for share in (1.0, 0.0996, 0.094, 0.0)] == ["100 %", "10 %", "9.4 %", "0.0 %"]
    shares = {0.5: (0.497, 0.529), 0.25: (0.25, 0.252), 0.02: (0.02, 0.02)}
    results = [
        result("h2o", budget, (100,), (share,), task)
        for budget, both in shares.items()
        for task, share in zip(made_up.TASKS, both, strict=True)
    ]
    assert kept_shares_text(results) == "2.0, 25, 50 to 53 %" and kept_shares_text([]) == ""


def test_every_legend_says_what_was_kept(mixed):
    comparison = of(mixed)
    labels = ["full (100 %)", "h2o (25 %)", "snapkv (32 %)", "mine (25 %)", "flags (63 %)", "fitting (26 %)"]
    [quality], [lead] = charts.quality_charts(comparison, "ppl"), charts.lead_charts(comparison)
    assert [line.name for line in quality.lines] == labels
    assert [line.name for line in lead.lines] == labels[1:]
    assert [line.name for line in quality.lines if line.level] == labels[:1]
    page = render(comparison)
    assert all(f"</svg>{label}</li>" in "".join(page.splitlines()) for label in labels)
    assert page.count("stroke-dasharray") == 2  # levels of the leading curves and of the task
