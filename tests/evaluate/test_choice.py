"""The promise of a choice, by simulation: costs are drawn whose true means are known."""

import math
from statistics import fmean

import numpy as np
import pytest

from ag.evaluate.choice import (
    Moments,
    SharesTest,
    Trial,
    growth,
    promising,
    rows_needed,
    upper_bound,
)

LOSS, CLIP, CONFIDENCE = 0.02, 0.5, 0.9
SHARES = (0.8, 0.5, 0.3, 0.1)
DRAWS = 500
#: Three standard deviations of a share of 500 draws that is 0.1.
DRAWN = 3 * math.sqrt(0.1 * 0.9 / DRAWS)


def rare(generator, mean, rows):
    """Most rows cost nothing and a few the largest cost: the distribution that few rows tell the least of."""
    return np.where(generator.random(rows) < mean / CLIP, CLIP, 0.0)


def heavy(generator, mean, rows):
    """A gamma distribution of shape 0.3, which hardly reaches the largest cost."""
    return np.minimum(generator.gamma(0.3, mean / 0.3, rows), CLIP)


def wide(generator, mean, rows):
    return np.clip(generator.normal(mean, 0.05, rows), -CLIP, CLIP)


def run_test(generator, draw, means, search=40, rows=120, confidence=CONFIDENCE):
    """Run search and test on drawn costs; `means` by policy and share, from the largest share to the smallest."""
    trials, true = [], {}
    for policy in means:
        trials.append([Trial(share) for share in SHARES])
        for trial, mean in zip(trials[-1], policy, strict=True):
            true[id(trial)] = mean
            for cost in draw(generator, mean, search).tolist():
                trial.add_search(cost)
    test = SharesTest([group for group in promising(trials, LOSS) if group], LOSS, CLIP, confidence, rows)
    for _ in range(rows):
        if not test.running:
            break
        test.add([float(draw(generator, true[id(trial)], 1)[0]) for trial in test.running])
    return test, true


@pytest.mark.parametrize("draw", [rare, heavy, wide])
@pytest.mark.parametrize(
    "means",
    [
        [(0.0201, 0.021, 0.022, 0.03)],
        [(0.002, 0.0201, 0.021, 0.03), (0.0201, 0.0201, 0.0201, 0.0201), (0.001, 0.003, 0.0201, 0.3)],
    ],
    ids=["one policy", "three policies"],
)
def test_a_share_above_the_bound_is_seldom_said_to_hold(draw, means):
    generator, wrong, below = np.random.default_rng(0), 0, 0
    if draw is heavy:  # the largest cost cuts its mean a little: raise it above the bound again
        means = [tuple(mean * 1.02 for mean in policy) for policy in means]
    for _ in range(DRAWS):
        test, true = run_test(generator, draw, means)
        wrong += any(true[id(x)] > LOSS for group in test.trials for x in test.holding(group))
        below += any(
            true[id(trial)] > bound
            for group in test.trials
            for trial, bound in zip(group, test.bounds(group), strict=True)
            if bound is not None and trial.costs
        )
    print(wrong, below)
    assert wrong / DRAWS <= 1 - CONFIDENCE + DRAWN
    assert below / DRAWS <= 1 - CONFIDENCE + DRAWN


def test_cheap_shares_are_found_and_dear_ones_cost_few_rows():
    generator, chosen, read = np.random.default_rng(0), [], []
    means = [(0.0, 0.002, 0.004, 0.2), (0.01, 0.1, 0.3, 0.4)]
    for _ in range(50):
        test, _ = run_test(generator, wide, means, rows=300)
        chosen.append(min((x.share for group in test.trials for x in test.holding(group)), default=1.0))
        read.append([len(trial.costs) for trial in test.trials[0]])
        assert len(test.trials) == 1  # the second policy is left out by the search
    assert np.mean(np.array(chosen) == 0.3) >= 0.9
    assert all(len(rows) == 3 for rows in read) and np.mean(read) < 200
