"""Which results hold equally much: kept shares worked out by hand, and the pairs that follow from them."""

from dataclasses import replace
from pathlib import Path

import pytest

from ag.evaluate.comparison import figures
from ag.evaluate.comparison.figures import kept_shares_text
from ag.evaluate.comparison.folder import FinishedCell
from ag.evaluate.comparison.page import render
from ag.evaluate.comparison.rows import (
    Comparison,
    at_budget,
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


def result(label, budget, tokens, kept, task="ppl"):
    """A result on prompts of these tokens with these kept shares; nats are the share evicted."""
    made = made_up.result("ppl", label, budget, 0.0, 0)
    outcomes = [
        Outcome(str(i), 3.0 - share + 0.001 * i, n, share, 9, 0.1)
        for i, (n, share) in enumerate(zip(tokens, kept, strict=True))
    ]
    total = sum(n * share for n, share in zip(tokens, kept, strict=True)) / sum(tokens)
    mean = sum(one.score for one in outcomes) / len(outcomes)
    key = f"{task}{label}{budget}{total}"
    summary = replace(made.summary, key=key, task=task, kept=total, mean=mean, n=len(outcomes), floor=None)
    return FinishedCell(summary, outcomes, [])


def of(results, baseline="full"):
    return Comparison(results, Path(), baseline)


def test_flags_on_fewer_prompts_do_not_hold_as_much_as_a_budget_on_more():
    """Half of 20 prompts has as many tokens as a quarter of 40, and not as many for each prompt."""
    flags = result("flags", None, [100] * 20, [0.5] * 20)
    h2o = result("h2o", 0.25, [100] * 40, [0.25] * 40)
    assert not same_kept_share(*rows(flags, h2o))


def rows(*results):
    return of(results).results


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
    cells = result("h2o", budget, LENGTHS, kept), result("flags", None, LENGTHS, flags)
    one, other = rows(*cells)
    assert same_kept_share(one, other) is same_kept_share(other, one) is alike
    if not alike and budget == 60:
        assert uncompared_results(of(cells)) == ["ppl: flags keeps 30.0 % of a prompt on average, h2o 60 40.0 %"]


def test_texts_that_the_model_writes_differ_in_length():
    """70 tokens held behind solutions of 200 and of 230 tokens are the same memory, 110 are not."""
    cells = [result("h2o", 70, (200, 200), (0.35, 0.35)), result("tova", 70, (230, 230), (70 / 230, 70 / 230))]
    one, other, more = rows(*cells, result("tova", 70, (230, 230), (110 / 230, 110 / 230)))
    assert not shares_agree(0.35, 70 / 230)
    assert same_kept_share(one, other) and same_kept_share(other, one)
    assert not same_kept_share(one, more)


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
    compared, others = at_budget(comparison.results, "0.25")
    assert [one.label for one in compared] == ["mine", "h2o", "fitting"]
    assert [(one.label, other.label) for one, other in others] == [("snapkv", "mine"), ("flags", "mine")]
    verdict = find_verdict(comparison, "ppl", "0.25")
    assert (verdict.best.label, verdict.rival.label) == ("fitting", "h2o")
    assert uncompared_results(comparison) == [
        "ppl: snapkv 0.25 keeps 32.0 %, mine 0.25 25.0 %",
        "ppl: flags keeps 63.0 %, mine 0.25 25.0 %",
    ]
    for text in (render(comparison, {}), markdown(comparison)):
        assert all(line in text for line in uncompared_results(comparison))
    assert [one.label for one in comparison.results if one.difference != one.difference] == ["full"]
    without = find_verdict(of([cell for cell in mixed if cell.summary.budget is None]), "ppl", "")
    assert (without.best.label, without.rival.label) == ("flags", "full")
    assert "level" not in str(without)  # gates that hold different shares are neither rivals nor level


def test_a_baseline_that_evicts_is_for_those_that_hold_as_much(mixed):
    def paired(comparison):
        return [*comparison.rows.name[comparison.rows.difference.notna()]]

    comparison = of(mixed, "flags")
    assert paired(comparison) == ["full"]
    assert "ppl: h2o 0.25 keeps 25.0 %, flags 63.0 %" in uncompared_results(comparison)
    near = of(mixed, "fitting")
    assert near.results[2].difference == pytest.approx(0.01) and "snapkv 0.25" not in paired(near)
    same = of([*mixed, result("tova", 0.5, LENGTHS, (0.5, 0.5)), result("h2o", 0.5, LENGTHS, (0.5, 0.5))], "h2o")
    assert paired(same) == ["mine 0.25", "tova 0.5"]  # at the same budget


def test_shares_as_text():
    assert [percent(share) for share in (1.0, 0.0996, 0.094, 0.0)] == ["100 %", "10 %", "9.4 %", "0.0 %"]
    assert kept_shares_text([0.02, 0.25, 0.252, 0.497]) == "2.0, 25, 50 %"


def test_every_legend_says_what_was_kept(mixed):
    comparison = of(mixed)
    labels = ["full (100 %)", "h2o (25 %)", "snapkv (32 %)", "mine (25 %)", "flags (63 %)", "fitting (26 %)"]
    [quality], [lead] = figures.quality_charts(comparison, "ppl"), figures.lead_charts(comparison)
    assert {*quality.points.name} == {*labels} and {*lead.points.name} == {*labels[1:]}
    assert [*quality.points.name[quality.points.level]] == labels[:1]
    page = render(comparison, {"lead": [lead], "quality_ppl": [quality]})
    assert all(f"</span> {label}</li>" in page for label in labels)
    assert page.count("stroke-dasharray") == 2  # levels of the leading curves and of the task
