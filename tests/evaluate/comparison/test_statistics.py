"""Statistics against cases by hand and against their definitions."""

import itertools
import math

import numpy as np
import pytest

from ag.evaluate.comparison.statistics import bootstrap, bootstrap_parts, compare, mean_and_error, sign_flips

#: Four deviations of a quantile of 10,000 resamples, in errors: sqrt(0.025 0.975 / 10,000) / phi(1.96) is 0.027.
DRAWN = 4 * 0.027


def sign_flip(differences):
    return float(sign_flips(np.array([differences]))[0])


def test_mean_and_standard_error():
    """1, 2, 3, 6: mean 3, sum of squares 14, variance 14/3, standard error sqrt(14/3) / 2."""
    assert mean_and_error([1, 2, 3, 6]) == pytest.approx((3.0, math.sqrt(14 / 3) / 2))
    assert mean_and_error([0.25]) == (0.25, None)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1.0, 2.0, 3.0], 2 / 8),  # only +++ and --- reach 6
        ([1.0, 2.0, -3.0], 8 / 8),  # every pattern reaches 0
        ([1.0, 1.0, 1.0, -1.0], 10 / 16),  # |sum| >= 2: all but the 6 patterns of two and two
        ([0.0, 0.0], 1.0),
        ([0.1] * 10, 2 / 1024),
        ([1.0] * 40, 1 / 10_001),  # of random patterns none reaches it: p is never 0
    ],
)
def test_sign_flips(differences, p):
    assert sign_flip(differences) == pytest.approx(p)


def test_sign_flip_of_many_differences_is_near_the_exact_value():
    differences = np.random.default_rng(3).normal(0.35, 1, 16)
    patterns = np.array(list(itertools.product((1, -1), repeat=16)))
    exact = (np.abs(patterns @ differences) >= abs(differences.sum()) - 1e-9).mean()
    assert 0.02 < exact < 0.98
    assert sign_flip(differences) == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 10_000))


def test_bootstrap():
    """Resampling 0 and 1: means 0, 0.5 and 1 with probability 1/4, 1/2, 1/4; of many values the normal interval."""
    assert bootstrap(np.array([0.0, 1.0])) == (0.0, 1.0)
    assert bootstrap(np.array([0.0, 1.0]), level=0.4) == (0.5, 0.5)
    values = np.random.default_rng(1).normal(2, 3, 400)
    error = values.std(ddof=1) / 20
    normal = values.mean() - 1.96 * error, values.mean() + 1.96 * error
    assert bootstrap(values) == pytest.approx(normal, abs=DRAWN * error)


def test_comparison_is_paired_and_repeatable():
    mine, theirs = [3.0, 30.0, 300.0], [2.0, 28.0, 297.0]
    paired = compare(mine, theirs)
    assert (paired.n, paired.difference, paired.p, paired.low, paired.high) == (3, 2.0, 0.25, 1.0, 3.0)
    assert paired.error == pytest.approx(1 / math.sqrt(3))  # of 1, 2 and 3, whose standard deviation is 1
    single = compare([2.0], [1.5])
    assert single.error is None and math.isnan(single.low) and math.isnan(single.high) and not single.certain
    assert compare(mine, theirs) == paired
    other = compare(theirs, mine)
    assert (other.difference, other.low, other.high, other.p) == (-2.0, -3.0, -1.0, 0.25)
    with pytest.raises(ValueError, match="2 and 1"):
        compare([1.0, 2.0], [1.0])


def two_stage_variance(parts):
    """Of the mean over samples of their parts' means, when samples and then parts are drawn with replacement."""
    means = [np.mean(values) for values in parts]
    within = np.mean([np.var(values) / len(values) for values in parts])
    return (np.var(means) + within) / len(parts)


@pytest.mark.parametrize("inside", [0.0, 3.0])
def test_bootstrap_of_parts_has_the_variance_of_both_stages(inside):
    rng = np.random.default_rng(4)
    parts = [rng.normal(0.3) + inside * rng.normal(size=size) for size in [6] * 30 + [2] * 10]
    low, high = bootstrap_parts([(values, np.ones(len(values))) for values in parts])
    error = math.sqrt(two_stage_variance(parts))
    assert high - low == pytest.approx(2 * 1.96 * error, abs=2 * DRAWN * error)
    assert (low + high) / 2 == pytest.approx(np.mean([values.mean() for values in parts]), abs=2 * DRAWN * error)


def test_parts_weigh_by_their_tokens():
    part = np.array([0.0, 1.0]), np.array([3.0, 1.0])  # one sample: both parts, or one of them twice
    assert bootstrap_parts([part], level=0.25) == (0.25, 0.25)  # half of the resamples draw both parts
    assert compare([0.25], [0.0], [part]).difference == 0.25
