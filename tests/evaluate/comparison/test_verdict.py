"""The verdict, for scores whose differences are known, and statistics computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from ag.evaluate.comparison.figures import lead_charts, looks
from ag.evaluate.comparison.folder import FinishedCell
from ag.evaluate.comparison.page import render
from ag.evaluate.comparison.rows import Comparison
from ag.evaluate.comparison.tables import markdown
from ag.evaluate.comparison.verdict import find_verdict, find_verdicts, headlines
from tests.support import made_up

pytestmark = pytest.mark.usefixtures("no_charts")


def lead(comparison, task, budget, other):
    """Mean lead in nats of the gates over another policy at a budget."""
    rows = comparison.at(task, budget)
    at = {row.label: [x.tags.get("nats", x.score) for x in comparison.outcomes(row)] for row in rows}
    return np.mean(at[other]) - np.mean(at["mine"])


def test_gates_that_lead(tmp_path):
    """They cost 0.2 nats a share evicted, h2o 0.5: 0.15 at half the memory. Nats decide, not hits."""
    comparison = made_up.comparison(tmp_path)
    found = find_verdicts(comparison)
    assert len(found) == 8 and [one.task for one in headlines(found)] == [*made_up.TASKS]
    for first in headlines(found):
        assert (first.budget, first.best.label, first.rival.label) == ("0.5", "mine", "h2o")
        gain = lead(comparison, first.task, "0.5", "h2o")
        assert abs(gain - 0.15) < 2**0.5 * made_up.NOISE
        assert first.certain and first.gain.difference == pytest.approx(gain)
        ends = f"[{first.gain.low:.3f}, {first.gain.high:.3f}] (n = 24, p < 0.001)"
        at = f"At 50 % of the memory (budget 0.5), {first.task}"
        assert first.sentences[0] == f"{at}: mine, {gain:.3f} nats ahead of h2o {ends}"


def test_policies_that_do_not_differ(tmp_path):
    verdict = find_verdict(made_up.comparison(tmp_path, mine=0.5), "ppl", "0.5")
    assert not verdict.certain and "cannot be told from" in verdict.sentences[0]
    assert "ahead" not in str(verdict) and "tova" not in verdict.sentences[0]


def test_gates_are_not_rivals_of_gates(tmp_path):
    """By the parts of the policy, not by its label."""
    cells = made_up.comparison(tmp_path).cells.values()
    gated = [replace(cell.summary, policy="ag.policy('gates:other')") for cell in cells]
    second = [
        cell._replace(summary=summary) if summary.label.startswith("h2o") else cell
        for cell, summary in zip(cells, gated, strict=True)
    ]
    verdict = find_verdict(Comparison(second, tmp_path), "ppl", "0.3")
    assert (verdict.best.label, verdict.rival.label) == ("mine", "tova")


def test_the_best_is_best_on_common_samples(tmp_path):
    """In joined folders one policy may have run on more samples, which are harder."""
    cells = list(made_up.comparison(tmp_path, mine=0.2, h2o=0.5).cells.values())
    for index, (summary, outcomes, _) in enumerate(cells):
        if summary.label != "mine":
            easy = sorted(outcomes, key=lambda outcome: outcome.score)[:12]
            mean = float(np.mean([outcome.score for outcome in easy]))
            cells[index] = FinishedCell(replace(summary, n=12, mean=mean), easy, [])
    comparison = Comparison(cells, tmp_path)
    mine, h2o = (row for row in comparison.at("ppl", "0.5") if row.label in ("mine", "h2o"))
    verdict = find_verdict(comparison, "ppl", "0.5")
    assert mine.mean > h2o.mean and (verdict.best.label, verdict.rival.label) == ("mine", "h2o")


def test_solutions_that_the_full_cache_wrote_anew_are_not_paired(tmp_path):
    """Of 12 problems the last two have another solution on the second machine."""
    full, h2o = scored("full", None, 12, of=12), scored("h2o", 0.5, 7, of=12)
    cells = []
    for cell, written_anew in ((full, ""), (h2o, " anew")):
        solutions = ["solution"] * 10 + [f"solution{written_anew}"] * 2
        pairs = zip(cell.outcomes, solutions, strict=True)
        cells.append(cell._replace(outcomes=[replace(one, tags={"solution": text}) for one, text in pairs]))
    comparison = Comparison(cells, tmp_path)
    [evicting] = [row for row in comparison.results if row.label == "h2o"]
    paired = comparison.paired(evicting, comparison.baseline_at(evicting))
    assert paired is not None and paired.n == 10
    assert paired.difference == pytest.approx(
        float(np.mean([one.score - two.score for one, two in zip(h2o.outcomes[:10], full.outcomes[:10], strict=True)]))
    )


def test_memory_and_scores_are_of_common_samples(tmp_path):
    """The full cache has read twelve further prompts, which are twice as long and which it fails."""
    full, h2o = scored("full", None, 24), scored("h2o", 0.5, 6, of=12)
    sizes = [1000] * 12 + [2000] * 12
    outcomes = [
        replace(one, kv_bytes=size, score=float(size == 1000), tags={"nats": 1.0})
        for one, size in zip(full.outcomes, sizes, strict=True)
    ]
    full = FinishedCell(replace(full.summary, kv_bytes=1500.0, mean=0.5, nats=1.0), outcomes, [])
    outcomes = [replace(one, kv_bytes=500, tags={"nats": 1.5}) for one in h2o.outcomes[:12]]
    h2o = FinishedCell(replace(h2o.summary, kv_bytes=500.0, nats=1.5), outcomes, [])
    comparison = Comparison([full, h2o], tmp_path)
    assert [row.memory for row in comparison.results] == [1.0, 0.5]
    verdict = str(find_verdict(comparison, "needles", "0.5"))
    assert verdict.startswith("At 50 % of the memory") and "exact match 0.500 against 1.000, -0.500 [" in verdict
    assert "it is far from the full cache" in verdict  # half of 1.0 is more than half of what is above the floor of 0.1


def test_half_the_memory_is_measured(tmp_path):
    """Budgets in bytes: 0.5 keeps 90 % of the full cache's, 0.1 keeps 45 %; without a full cache the kept share."""
    sizes = {"": 1000, "0.5": 900, "0.1": 450}
    cells = [
        cell._replace(outcomes=[replace(one, kv_bytes=sizes[f"{cell.summary.budget or ''}"]) for one in cell.outcomes])
        for cell in made_up.comparison(tmp_path).cells.values()
        if f"{cell.summary.budget or ''}" in sizes
    ]
    first = headlines(find_verdicts(Comparison(cells, tmp_path)))[0]
    assert first.budget == "0.1" and first.memory == 0.45
    assert str(first).startswith("At 45 % of the memory (budget 0.1), needle_books: ")
    evicting = Comparison([cell for cell in cells if cell.summary.budget], tmp_path)
    first = headlines(find_verdicts(evicting))[0]
    assert str(first).startswith("With 50 % kept (budget 0.5), needle_books: ")


def test_my_policy_is_named_with_its_place(tmp_path):
    """The last one, unless another is mine; the rival is in the first sentence already."""
    cells = list(made_up.comparison(tmp_path).cells.values())
    verdict = find_verdict(Comparison(cells, tmp_path), "ppl", "0.5")
    lag = -lead(made_up.comparison(tmp_path), "ppl", "0.5", "tova")
    assert verdict.sentences[1].startswith(f"tova, number 4 of 4, {-lag:.3f} nats behind mine [")
    assert verdict.sentences[1].endswith(" (n = 24, p < 0.001)")
    other = find_verdict(Comparison(cells, tmp_path, mine="h2o+caote@preference"), "ppl", "0.5")
    assert other.sentences[1].startswith("h2o+caote@preference, number 3 of 4, ")
    for mine in ("mine", "h2o"):
        assert "number" not in str(find_verdict(Comparison(cells, tmp_path, mine=mine), "ppl", "0.5"))


def test_the_distance_to_the_full_cache(tmp_path):
    """Gates cost 0.2 nats times what is evicted; where nats decide, both scores stand beside them."""
    comparison = Comparison(list(made_up.comparison(tmp_path).cells.values()), tmp_path, mine="mine")
    by_nats, by_score = (find_verdict(comparison, task, "0.1") for task in made_up.TASKS)
    for verdict in (by_nats, by_score):
        cost = -lead(comparison, verdict.task, "0.1", "full")
        assert cost == pytest.approx(0.18, abs=made_up.NOISE)
        assert verdict.sentences[1].startswith(f"mine, {cost:.3f} nats behind full [") and "far" not in str(verdict)
    at = {row.label: row.mean for row in comparison.at(by_nats.task, "0.1")}
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
    changes |= {"key": f"needles{label}{budget}", "n": 0 if problem else of}
    return FinishedCell(replace(one.summary, **changes), [] if problem else outcomes, [])


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
    verdict = find_verdict(Comparison(results, tmp_path), "needles", "0.1")
    assert f"h2o, {(rights[0] - rights[1]) / of:.3f} in exact match behind full [" in str(verdict)
    p = 2 * 0.5 ** (rights[0] - rights[1])  # of the differences, all of one sign
    assert ("may be chance" in verdict.sentences[1]) == (p >= 0.05)
    assert ("far" in str(verdict)) == (words is not None) and (words or "") in str(verdict)


@pytest.mark.parametrize(("cost", "far"), [(0.6, False), (0.8, True)])
def test_half_as_likely_is_far(cost, far, tmp_path):
    """exp(-0.6) is more than a half, exp(-0.8) is less; a single policy is compared with the full cache."""
    results = [made_up.result("ppl", "full", None, 0.0, 0)]
    results += [made_up.result("ppl", label, 0.1, cost, seed) for seed, label in enumerate(("h2o", "tova"), 1)]
    assert ("both are far" in str(find_verdict(Comparison(results, tmp_path), "ppl", "0.1"))) == far
    alone = find_verdict(Comparison(results[:2], tmp_path), "ppl", "0.1")
    assert alone.rival.label == "full"
    assert ("it is far" in str(alone)) == far and str(alone).count("behind full") == 1


def test_policies_that_are_left_out_and_why(tmp_path):
    """Of those at the budget and without one; a long reason is cut."""
    broken = scored("snapkv", 0.5, 0, problem="out of memory: " + "tried to allocate " * 20)
    flags = scored("flags", None, 20, kept=0.632)
    good = [scored("full", None, 24), scored("h2o", 0.5, 12), scored("tova", 0.5, 11), scored("tova", 0.25, 2)]
    comparison = Comparison([*good, broken, flags], tmp_path, hidden=["needles: cake 0.5"])
    [first, second] = find_verdicts(comparison)  # at 0.25 tova is compared with the full cache
    last = first.sentences[-1]
    assert last.startswith("Left out: snapkv (no result: out of memory: tried") and len(last) < 220
    assert last.endswith(" ...), flags (it keeps 63 % of the prompt)")
    assert second.sentences[-1] == "Left out: flags (it keeps 63 % of the prompt)"
    page = render(comparison, {})
    assert last in page and last in markdown(comparison)
    assert "1 row in this folder" in page and "needles: cake 0.5" in page


def test_without_a_verdict_it_says_why(tmp_path):
    refused = [scored("full", None, 24), scored("h2o", 0.5, 0, problem="nothing is read behind it")]
    [nothing] = find_verdicts(Comparison(refused, tmp_path))
    assert str(nothing) == (
        "needles (budget 0.5): no verdict, no policy has a result at this budget. "
        "Left out: h2o (no result: nothing is read behind it)"
    )
    [alone] = find_verdicts(Comparison([scored("h2o", 0.5, 12)], tmp_path, "h2o"))
    assert str(alone) == "needles (budget 0.5): no verdict, no other policy can be compared with h2o"
    unable = [scored("full", None, 2), scored("h2o", 0.5, 2), scored("tova", 0.5, 2)]
    [unable] = find_verdicts(Comparison(unable, tmp_path))
    assert str(unable).startswith("needles: no verdict, not informative for this model: exact match 0.0833")
    assert not any(one.certain for one in (nothing, alone, unable))
    cells, full = [scored("h2o", 0.5, 12), scored("tova", 0.5, 2)], scored("full", None, 24)
    others = full._replace(outcomes=[replace(one, sample=f"other {one.sample}") for one in full.outcomes])
    for more in ([], [others]):  # no full cache, and one on other samples
        no_full = find_verdict(Comparison([*more, *cells], tmp_path, "h2o"), "needles", "0.5")
        assert no_full.sentences[1] == "The full cache has no result to compare with"


def test_the_full_cache_in_the_models_type_says_what_a_model_can_do(tmp_path):
    """And not one in codes of 8 bits, wherever it stands, unless there is no other."""
    coded = scored("full int8", None, 1)
    coded = coded._replace(summary=replace(coded.summary, policy="ag.policy('full', kv_dtype='int8')"))
    cells = [scored("full", None, 24), coded, scored("h2o", 0.5, 12)]
    for order in (cells, [coded, *cells]):
        assert Comparison(order, tmp_path).uninformative("needles") == ""
    assert "0.0417" in Comparison(cells[1:], tmp_path).uninformative("needles")


def test_two_curves_lead(tmp_path):
    """Nats over full by kept share, gates drawn last and in one colour, the full cache as a level at 0."""
    comparison = made_up.comparison(tmp_path)
    first, second = lead_charts(comparison)
    assert first.title == "question after eviction: needle_books, 24 samples"
    assert second.title == "continuation: ppl, 24 samples"
    look = looks(comparison)
    assert [label for label in look if look[label].colour == "gates"] == ["mine"] and len({*look.values()}) == 5
    assert first.zero == "full" and first.y_label == "nats over the full cache"
    labels = ["mine", "h2o", "h2o+caote@preference", "tova"]
    for label, cost in zip(labels, (0.2, 0.5, 0.501, 0.9), strict=True):  # of what is evicted
        points = first.points[first.points.label == label].sort_values("x")
        assert [*points.x] == [0.1, 0.2, 0.3, 0.5]
        assert [*points.y] == pytest.approx(cost * np.array([0.9, 0.8, 0.7, 0.5]), abs=made_up.NOISE)
        assert (points.low < points.y).all() and (points.y < points.high).all()
    cells = comparison.cells.values()
    alone = Comparison([cell for cell in cells if cell.summary.budget], tmp_path, "h2o")
    [text] = [one for one in lead_charts(alone) if "ppl" in one.title]
    assert (text.y_label, text.zero) == ("nats", "")
    assert "they are standard errors of the mean" in " ".join(render(alone, {"lead": [text]}).split())
    one_share = Comparison([cell for cell in cells if cell.summary.budget in (None, 0.5)], tmp_path)
    assert lead_charts(one_share) == []
