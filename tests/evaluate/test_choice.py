"""The promise of a choice: exactly over all outcomes of few rows, and by simulation with known true means."""

import itertools
import math

import numpy as np
import pytest

from ag.evaluate.choice import SharesTest, Trial, least_loss, policies_allowed, promising, rows_needed

LOSS, CLIP, CONFIDENCE = 0.02, 0.5, 0.9
DRAWS, SEARCHED, ROWS = 500, 20, 130
#: Three standard deviations of how often something of probability 0.1 happens in 500 draws.
DRAWN = 3 * math.sqrt(0.1 * 0.9 / DRAWS)
JUST_ABOVE = 0.0201


def rare(generator, mean, rows):
    """Most rows cost nothing and a few the largest cost: rows tell least of this distribution."""
    return np.where(generator.random(rows) < mean / CLIP, CLIP, 0.0)


def heavy(generator, mean, rows):
    """A gamma distribution of shape 0.3, whose mean is raised by what clipping takes."""
    return np.minimum(generator.gamma(0.3, 1.02 * mean / 0.3, rows), CLIP)


def wide(generator, mean, rows):
    return np.clip(generator.normal(mean, 0.05, rows), -CLIP, CLIP)


def trial_of(search, share=0.5):
    trial = Trial(share)
    for cost in search:
        trial.add_search(cost)
    return trial


def run_test(generator, policies, rows=ROWS):
    """Search and test on drawn costs; `policies` are distributions with means, from the largest share down."""
    trials, truth = [], {}
    for draw, means in policies:
        group = [trial_of(draw(generator, mean, SEARCHED).tolist(), 0.8 / 2**i) for i, mean in enumerate(means)]
        truth |= {id(trial): (draw, mean) for trial, mean in zip(group, means, strict=True)}
        trials.append(group)
    test = SharesTest([group for group in promising(trials, LOSS, len(trials)) if group], LOSS, CLIP, CONFIDENCE, rows)
    costs = {id(x): truth[id(x)][0](generator, truth[id(x)][1], rows).tolist() for group in test.trials for x in group}
    for row in range(rows):
        if not test.running:
            break
        test.add([costs[id(trial)][row] for trial in test.running])
    return test, {key: mean for key, (_, mean) in truth.items()}


@pytest.mark.parametrize("loss", [0.02, 0.2])
@pytest.mark.parametrize("low", [0.0, -0.5])
def test_the_expected_capital_is_one(loss, low):
    """Over all outcomes of nine rows with a mean of exactly ``loss``: any look at the row that is bet on breaks it."""
    high_part, expected = (loss - low) / (CLIP - low), 0.0
    for outcome in itertools.product((low, CLIP), repeat=9):
        trial = trial_of([0.0, 0.01, -0.02, 0.0] * 8)
        for cost in outcome:
            trial.add_test(cost, np.array([loss]), CLIP)
        high = outcome.count(CLIP)
        expected += math.exp(trial.capital[0]) * high_part**high * (1 - high_part) ** (9 - high)
    assert expected == pytest.approx(1, abs=1e-12)


def test_fewer_rows_than_needed_show_nothing_and_free_rows_show_it_at_once():
    needed = rows_needed(LOSS, CLIP, 0.1 / 3)
    assert needed == math.ceil(math.log(30) / math.log(1 + 0.95 * 0.02 / 0.48))
    trials = [[trial_of([0.0] * 40)] for _ in range(3)]
    test = SharesTest(trials, LOSS, CLIP, 0.9, needed)
    for row in range(needed):
        assert len(test.running) == 3 and not any(trial.crossed for [trial] in trials), row
        test.add([0.0] * 3)
    assert test.running == [] and all(trial.crossed for [trial] in trials)


@pytest.mark.parametrize("rows", [3, 21, 60])
def test_the_least_loss_is_one_that_so_many_rows_can_show(rows):
    least = least_loss(rows, CLIP, 0.1)
    assert rows_needed(least * (1 + 1e-9), CLIP, 0.1) == rows < rows_needed(least * (1 - 1e-3), CLIP, 0.1)


def test_policies_beyond_what_the_rows_can_show_are_not_tested():
    assert policies_allowed(LOSS, CLIP, CONFIDENCE, 70) == 1
    three = next(rows for rows in range(70, 1000) if policies_allowed(LOSS, CLIP, CONFIDENCE, rows) == 3)
    assert rows_needed(LOSS, CLIP, 0.1 / 3) in (two_thirds := math.floor(three * 2 / 3), two_thirds + 1)
    trials = [[trial_of([cost] * 4)] for cost in (0.01, 0.005, 0.3, 0.015)]
    assert promising(trials, LOSS, 4) == [trials[0], trials[1], [], trials[3]]
    assert promising(trials, LOSS, 2) == [trials[0], trials[1], [], []]
    trials[3][0].share = 0.3  # and no larger share can win
    assert promising(trials, LOSS, 4) == [[], [], [], trials[3]]


def test_the_bound_is_the_smallest_mean_that_is_refuted():
    """Against a wager of one mean at a time."""
    costs, search = wide(np.random.default_rng(1), 0.08, 60).tolist(), [0.0, 0.02, 0.01]
    trial = trial_of(search)
    test = SharesTest([[trial]], LOSS, CLIP, CONFIDENCE, 10**6)
    for cost in costs:
        trial.add_test(cost, test.means, CLIP)
    [bound] = test.bounds([trial])

    def largest(mean):
        alone, capitals = trial_of(search), []
        for cost in costs:
            alone.add_test(cost, np.array([mean]), CLIP)
            capitals.append(alone.capital[0])
        return max(capitals)

    step = (CLIP - LOSS) / len(test.means)
    assert 0.08 < bound < 0.2
    assert largest(bound) >= math.log(10) > largest(bound - step)
    assert test.bounds([trial_of(search)]) == [CLIP]


@pytest.mark.parametrize(
    "policies",
    [
        [(rare, [JUST_ABOVE])] * 4,  # fails without a part of the level for each policy
        [(rare, [0.0, JUST_ABOVE]), (heavy, [JUST_ABOVE])],
    ],
    ids=["four policies", "several shares"],
)
def test_a_share_above_the_bound_is_seldom_said_to_hold(policies):
    generator, wrong, below = np.random.default_rng(0), 0, 0
    for _ in range(DRAWS):
        test, mean = run_test(generator, policies)
        wrong += any(mean[id(trial)] > LOSS for group in test.trials for trial in test.holding(group))
        bounds = [(mean[id(x)], y) for group in test.trials for x, y in zip(group, test.bounds(group), strict=True)]
        below += any(bound is not None and true_mean > bound for true_mean, bound in bounds)
    assert wrong / DRAWS <= 1 - CONFIDENCE + DRAWN
    assert below / DRAWS <= 1 - CONFIDENCE + DRAWN


def test_cheap_shares_are_found_and_dear_ones_cost_few_rows():
    generator = np.random.default_rng(0)
    policies, chosen = [(wide, [0.0, 0.002, 0.2]), (wide, [0.1, 0.2, 0.4])], []
    for _ in range(20):
        test, _ = run_test(generator, policies, rows=300)
        [group] = test.trials  # the search leaves out the second policy, and the share of cost 0.2
        assert [trial.share for trial in group] == [0.8, 0.4]
        chosen.append([trial.share for trial in test.holding(group)])
        assert all(len(trial.costs) < 300 for trial in group) == (len(chosen[-1]) == 2)
    assert chosen.count([0.8, 0.4]) >= 18


def test_a_share_behind_one_that_does_not_hold_does_not_hold():
    trials = [trial_of([0.0] * 20, share) for share in (0.8, 0.5, 0.3)]
    test = SharesTest([trials], LOSS, CLIP, CONFIDENCE, 1000)
    while not trials[2].crossed:
        test.add([0.03 if trial is trials[1] and len(trial.costs) % 2 else 0.0 for trial in test.running])
    assert trials[0].crossed and not trials[1].crossed
    assert test.holding(trials) == trials[:1]
    held, own, behind = test.bounds(trials)
    assert (held, behind) == (pytest.approx(LOSS), None) and LOSS < own <= CLIP


def test_a_policy_that_cannot_have_the_smallest_share_is_not_measured_further():
    small, large = Trial(0.3), Trial(0.5)
    test = SharesTest([[small], [large]], LOSS, CLIP, CONFIDENCE, 1000)
    while not small.crossed:
        assert test.running == [small, large]
        test.add([0.0, 0.0 if len(large.costs) % 2 else 0.03])
    assert test.running == [] and not large.crossed and large.stopped
