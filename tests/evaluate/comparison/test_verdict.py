"""What a comparison says first, against scores whose differences are known and statistics computed by hand."""

from dataclasses import replace

import made_up
import numpy as np
import pytest
from page_text import paths

from ag.evaluate.comparison.findings import Comparison
from ag.evaluate.comparison.lead import lead, looks
from ag.evaluate.comparison.page import render
from ag.evaluate.comparison.verdict import headlines, judge, verdicts


def difference(comparison, task, budget, mine, theirs):
    """Mean of the differences of two entries' nats, and the interval from resamples of another generator."""
    one, two = (
        next(e for e in comparison.of_task(task) if (e.row.label, e.budget) == (label, budget))
        for label in (mine, theirs)
    )
    gains = np.array(
        [
            b.tags.get("nats", b.score) - a.tags.get("nats", a.score)
            for a, b in zip(one.outcomes, two.outcomes, strict=True)
        ]
    )
    means = gains[np.random.default_rng(7).integers(0, len(gains), (20_000, len(gains)))].mean(1)
    return gains.mean(), *np.quantile(means, [0.025, 0.975])


@pytest.mark.parametrize("task", made_up.TASKS)
def test_gates_that_lead(task, tmp_path):
    """They cost 0.2 nats a share evicted, h2o 0.5: 0.15 at half the memory. Known nats judge, not hits."""
    comparison = made_up.comparison(tmp_path)
    [first] = [one for one in headlines(verdicts(comparison)) if one.task == task]
    assert (first.budget, first.best.row.label, first.rival.row.label) == ("0.5", "mine", "h2o")
    gain, low, high = difference(comparison, task, "0.5", "mine", "h2o")
    assert abs(gain - 0.15) < 0.02
    assert first.gain.difference == pytest.approx(gain)
    assert (first.gain.low, first.gain.high) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))
    assert first.certain and list(first.level) == []
    assert str(first) == (
        f"At half the memory, {task}: mine, {gain:.3f} nats ahead of h2o [{first.gain.low:.3f}, {first.gain.high:.3f}] "
        "(n = 24, p < 0.001)"
    )
    assert len(verdicts(comparison)) == 8


def test_where_nothing_differs_it_says_so(tmp_path):
    comparison = made_up.comparison(tmp_path, mine=0.5)
    verdict = judge(comparison, "ppl", "0.5")
    assert not verdict.certain
    assert "cannot be told from" in str(verdict) and "ahead" not in str(verdict)
    assert {"mine", "h2o", "h2o+caote@preference"} >= {verdict.best.row.label, verdict.rival.row.label, *verdict.level}
    assert "tova" not in verdict.level


def test_gates_are_not_rivals_of_gates(tmp_path):
    """Whatever they are called: the row's policy counts, not its label."""
    comparison = made_up.comparison(tmp_path)
    second = [
        replace(e, row=replace(e.row, policy=e.row.policy.replace("h2o", "gates:other"))) for e in comparison.entries
    ]
    verdict = judge(Comparison(tmp_path, "full", second), "ppl", "0.3")
    assert (verdict.best.row.label, verdict.rival.row.label) == ("mine", "tova")
    named = [
        replace(e, row=replace(e.row, policy=e.row.policy.replace("gates:", "gates_mean:"))) for e in comparison.entries
    ]
    assert not any(entry.is_gated for entry in named)


def test_flags_of_gates_compete_where_they_hold_no_more(tmp_path):
    comparison = made_up.comparison(tmp_path)
    flagged = made_up.entry("ppl", "mine", None, 0.01, 99)
    for kept, best in ((0.45, "mine"), (0.55, "h2o")):
        row = replace(flagged.row, kept=kept, policy="ag.policy('gates:somewhere')")
        rest = [e for e in comparison.entries if e.row.label != "mine"]
        verdict = judge(Comparison(tmp_path, "full", [*rest, replace(flagged, row=row)]), "ppl", "0.5")
        assert verdict.best.row.label == best


def test_one_policy_is_held_against_the_full_cache(tmp_path):
    entries = [e for e in made_up.comparison(tmp_path).entries if e.row.label in ("full", "tova")]
    verdict = judge(Comparison(tmp_path, "full", entries), "ppl", "0.1")
    assert (verdict.best.row.label, verdict.rival.row.label) == ("tova", "full")
    assert "nats behind full [0.8" in str(verdict)
    assert verdict.gain.difference == pytest.approx(-0.81, abs=0.02)


def test_two_curves_lead(tmp_path):
    """Nats over full against what was kept, gates drawn last and in one colour, the full cache as a level at 0."""
    comparison = made_up.comparison(tmp_path)
    (asked, first), (going_on, second) = lead(comparison)
    assert (asked, going_on) == ("question after eviction: needle_books", "continuation: ppl")
    assert looks(comparison) == {
        "full": (0, False),
        "mine": (0, True),
        "h2o": (1, False),
        "h2o+caote@preference": (2, False),
        "tova": (3, False),
    }
    lines = paths(first)
    assert [colour for colour, _ in lines][-1] == "gates"
    colour, level = next((c, d) for c, d in lines if "H" in d)
    assert colour == "c0"
    zero = float(level.split(",")[1].split("H")[0])
    drawn = {
        colour: [tuple(map(float, point.split(","))) for point in d[1:].split("L")] for colour, d in lines if "L" in d
    }
    assert drawn.keys() == {"gates", "c1", "c2", "c3"}
    heights = [zero - y for _, y in drawn["c3"]]  # tova: 0.9 nats times what is evicted, at 0.1, 0.2, 0.3 and 0.5
    assert np.array(heights) / heights[0] == pytest.approx(np.array([0.9, 0.8, 0.7, 0.5]) / 0.9, abs=0.03)
    across = [x for x, _ in drawn["gates"]]
    assert np.diff(across) / (across[1] - across[0]) == pytest.approx([1, 1, 2], abs=0.02)
    for _, y in drawn["gates"]:
        assert y < zero


def test_without_several_shares_nothing_leads(tmp_path):
    entries = [e for e in made_up.comparison(tmp_path).entries if e.budget in ("", "0.5")]
    assert lead(Comparison(tmp_path, "full", entries)) == []
    assert 'id="lead"' not in render(Comparison(tmp_path, "full", entries))


def test_rows_that_are_not_shown_are_told(tmp_path):
    comparison = replace(made_up.comparison(tmp_path), hidden=["ppl: cake 0.5"])
    assert "1 row in this folder" in render(comparison) and "ppl: cake 0.5" in render(comparison)
    assert "in this folder" not in render(made_up.comparison(tmp_path))
