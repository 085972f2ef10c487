"""The verdict, for scores whose differences are known, and statistics computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from ag.config.spec import PolicySpec
from ag.evaluate.comparison.charts import lead_charts, line_styles
from ag.evaluate.comparison.page import render
from ag.evaluate.comparison.result import Comparison, Result
from ag.evaluate.comparison.tables import markdown
from ag.evaluate.comparison.verdict import find_verdict, find_verdicts, headlines
from tests.support import made_up

pytestmark = pytest.mark.usefixtures("no_charts")


def lead(comparison, task, budget, other):
    """Mean lead in nats of the gates over another policy at a budget."""
    at = {one.summary.label: [x.tags.get("nats", x.score) for x in one.outcomes] for one in comparison.at(task, budget)}
    return np.mean(at[other]) - np.mean(at["mine"])


def test_gates_that_lead(tmp_path):
    """They cost 0.2 nats a share evicted, h2o 0.5: 0.15 at half the memory. Nats decide, not hits."""
    comparison = made_up.comparison(tmp_path)
    found = find_verdicts(comparison)
    assert len(found) == 8 and [one.task for one in headlines(found)] == [*made_up.TASKS]
    for first in headlines(found):
        assert (first.budget, first.best.summary.label, first.rival.summary.label) == ("0.5", "mine", "h2o")
        gain = lead(comparison, first.task, "0.5", "h2o")
        assert abs(gain - 0.15) < 2**0.5 * made_up.NOISE
        assert first.certain and first.gain.difference == pytest.approx(gain)
        ends = f"[{first.gain.low:.3f}, {first.gain.high:.3f}] (n = 24, p < 0.001)"
        assert first.sentences[0] == f"At half the memory, {first.task}: mine, {gain:.3f} nats ahead of h2o {ends}"


def test_policies_that_do_not_differ(tmp_path):
    verdict = find_verdict(made_up.comparison(tmp_path, mine=0.5), "ppl", "0.5")
    assert not verdict.certain and "cannot be told from" in verdict.sentences[0]
    assert "ahead" not in str(verdict) and "tova" not in verdict.sentences[0]


def test_gates_are_not_rivals_of_gates(tmp_path):
    """By the parts of the policy, not by its label."""
    comparison = made_up.comparison(tmp_path)
    gated = PolicySpec.parse("gates:other")
    second = [replace(one, spec=gated) if one.summary.label.startswith("h2o") else one for one in comparison.results]
    verdict = find_verdict(Comparison(tmp_path, "full", second), "ppl", "0.3")
    assert (verdict.best.summary.label, verdict.rival.summary.label) == ("mine", "tova")


def test_the_distance_to_the_full_cache(tmp_path):
    """Gates cost 0.2 nats times what is evicted; where nats decide, both scores stand beside them."""
    comparison = made_up.comparison(tmp_path)
    by_nats, by_score = (find_verdict(comparison, task, "0.1") for task in made_up.TASKS)
    for verdict in (by_nats, by_score):
        cost = -lead(comparison, verdict.task, "0.1", "full")
        assert cost == pytest.approx(0.18, abs=made_up.NOISE)
        assert verdict.sentences[1].startswith(f"mine, {cost:.3f} nats behind full [") and "far" not in str(verdict)
    at = {one.summary.label: one.summary.mean for one in comparison.at(by_nats.task, "0.1")}
    means = at["mine"], at["full"]
    assert "recall {:.3f} against {:.3f}, {:+.3f} [".format(*means, means[0] - means[1]) in str(by_nats)
    assert "against" not in str(by_score)


def scored(label, budget, rights, of=24, problem=None, kept=None):
    """A result of a task without nats: exact match, with this number right."""
    one = made_up.result("ppl", label, budget, 0.0, 1)
    scores = [float(i < rights) for i in range(of)]
    outcomes = [replace(outcome, score=s) for outcome, s in zip(one.outcomes, scores, strict=False)]
    changes = {"task": "needles", "metric": "exact match", "higher_is_better": True, "floor": 0.1, "problem": problem}
    changes |= {"mean": rights / of, "kept": one.summary.kept if kept is None else kept, "question": "after"}
    spec = PolicySpec.parse("flags:x") if label == "flags" else one.spec
    return Result(replace(one.summary, **changes), [] if problem else outcomes, [], spec)


@pytest.mark.parametrize(
    ("rights", "words"),
    [
        ((24, 14, 4), None),  # 10 of 24 lost: half of what is above the floor of 0.1 are 10.8
        ((24, 13, 12), "both are far from the full cache"),
        ((6, 3, 2), None),  # three of six against six is chance
    ],
)
def test_two_that_cannot_be_told_apart_may_both_be_far_from_full(rights, words, tmp_path):
    of = rights[0]
    results = [scored(*one, of=of) for one in zip(("full", "h2o", "random"), (None, 0.1, 0.1), rights, strict=True)]
    verdict = find_verdict(Comparison(tmp_path, "full", results), "needles", "0.1")
    assert f"h2o, {(rights[0] - rights[1]) / of:.3f} in exact match behind full [" in str(verdict)
    p = 2 * 0.5 ** (rights[0] - rights[1])  # of the differences, all of one sign
    assert ("may be chance" in verdict.sentences[1]) == (p >= 0.05)
    assert ("far" in str(verdict)) == (words is not None) and (words or "") in str(verdict)


@pytest.mark.parametrize(("cost", "far"), [(0.6, False), (0.8, True)])
def test_half_as_likely_is_far(cost, far, tmp_path):
    """exp(-0.6) is more than a half, exp(-0.8) is less; a single policy is compared with the full cache."""
    results = [made_up.result("ppl", "full", None, 0.0, 0)]
    results += [made_up.result("ppl", label, 0.1, cost, seed) for seed, label in enumerate(("h2o", "tova"), 1)]
    assert ("both are far" in str(find_verdict(Comparison(tmp_path, "full", results), "ppl", "0.1"))) == far
    alone = find_verdict(Comparison(tmp_path, "full", results[:2]), "ppl", "0.1")
    assert alone.rival.summary.label == "full"
    assert ("it is far" in str(alone)) == far and str(alone).count("behind full") == 1


def test_policies_that_are_left_out_and_why(tmp_path):
    """Of those at the budget and without one; a long reason is cut."""
    broken = scored("snapkv", 0.5, 0, problem="out of memory: " + "tried to allocate " * 20)
    flags = scored("flags", None, 20, kept=0.632)
    good = [scored("full", None, 24), scored("h2o", 0.5, 12), scored("tova", 0.5, 11), scored("tova", 0.25, 2)]
    comparison = Comparison(tmp_path, "full", [*good, broken, flags])
    [first, second] = find_verdicts(comparison)  # at 0.25 tova is compared with the full cache
    last = first.sentences[-1]
    assert last.startswith("Left out: snapkv (no result: out of memory: tried") and len(last) < 220
    assert last.endswith(" ...), flags (it keeps 63.2% of the prompt)")
    assert second.sentences[-1] == "Left out: flags (it keeps 63.2% of the prompt)"
    page = render(replace(comparison, hidden=["needles: cake 0.5"]))
    assert last in page and last in markdown(comparison)
    assert "1 row in this folder" in page and "needles: cake 0.5" in page


def test_without_a_verdict_it_says_why(tmp_path):
    refused = [scored("full", None, 24), scored("h2o", 0.5, 0, problem="nothing is read behind it")]
    [nothing] = find_verdicts(Comparison(tmp_path, "full", refused))
    assert str(nothing) == (
        "At half the memory, needles: no verdict, no policy has a result at this budget. "
        "Left out: h2o (no result: nothing is read behind it)"
    )
    [alone] = find_verdicts(Comparison(tmp_path, "h2o", [scored("h2o", 0.5, 12)]))
    assert str(alone) == "At half the memory, needles: no verdict, no other policy can be compared with h2o"
    unable = [scored("full", None, 2), scored("h2o", 0.5, 2), scored("tova", 0.5, 2)]
    [unable] = find_verdicts(Comparison(tmp_path, "full", unable))
    assert str(unable).startswith("needles: no verdict, not informative for this model: exact match 0.0833")
    assert not any(one.certain for one in (nothing, alone, unable))
    no_full = find_verdict(
        Comparison(tmp_path, "h2o", [scored("h2o", 0.5, 12), scored("tova", 0.5, 2)]), "needles", "0.5"
    )
    assert no_full.sentences[1] == "The full cache has no result to compare with"


def test_two_curves_lead(tmp_path):
    """Nats over full by kept share, gates drawn last and in one colour, the full cache as a level at 0."""
    comparison = made_up.comparison(tmp_path)
    first, second = lead_charts(comparison)
    assert first.title == "question after eviction: needle_books, 24 samples"
    assert second.title == "continuation: ppl, 24 samples"
    look = line_styles(comparison)
    assert [label for label in look if look[label].gated] == ["mine"] and len({*look.values()}) == 5
    labels = ["h2o", "h2o+caote@preference", "tova", "mine"]
    assert [line.style for line in first.lines] == [look[label] for label in labels]
    assert first.zero == look["full"] and first.y_label == "nats over the full cache"
    for line, cost in zip(first.lines, (0.5, 0.501, 0.9, 0.2), strict=True):  # of what is evicted
        assert [point.x for point in line.points] == [0.1, 0.2, 0.3, 0.5]
        costs = cost * np.array([0.9, 0.8, 0.7, 0.5])
        assert [point.y for point in line.points] == pytest.approx(costs, abs=made_up.NOISE)
        assert all(point.low < point.y < point.high for point in line.points)
    alone = [one for one in comparison.results if one.evicts]
    [text] = [one for one in lead_charts(Comparison(tmp_path, "h2o", alone)) if "ppl" in one.title]
    assert (text.y_label, text.zero) == ("nats", None)
    one_share = Comparison(tmp_path, "full", [e for e in comparison.results if e.budget in ("", "0.5")])
    assert lead_charts(one_share) == [] and 'id="lead"' not in render(one_share)
