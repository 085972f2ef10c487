"""Statistics against cases worked out by hand, and against their definitions."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        ([0.0, 5.0, 0.0], 2 / 2),  # one sign: both patterns reach 5
        ([0.0, 0.0], 1.0),
        ([0.1] * 10, 2 / 1024),
    ],
)
def test_sign_flip_of_few_differences_is_exact(differences, p):
    assert sign_flip(differences) == pytest.approx(p)


def test_sign_flip_of_many_differences_is_near_the_exact_value():
    differences = np.random.default_rng(3).normal(0.35, 1, 16)
    patterns = np.array(list(itertools.product((1, -1), repeat=16)))
    exact = (np.abs(patterns @ differences) >= abs(differences.sum()) - 1e-9).mean()
    assert 0.02 < exact < 0.98
    error = math.sqrt(exact * (1 - exact) / 10_000)
    assert sign_flip(differences) == pytest.approx(exact, abs=4 * error)


def test_p_is_never_zero():
    assert sign_flip(np.ones(40)) == pytest.approx(1 / 10_001)


def test_bootstrap_of_two_differences():
    """Resampling 0 and 1: means 0, 0.5 and 1 with probability 1/4, 1/2, 1/4, so that 95 % reach from 0 to 1."""
    assert bootstrap(np.array([0.0, 1.0])) == (0.0, 1.0)
    assert bootstrap(np.array([0.0, 1.0]), level=0.4) == (0.5, 0.5)


def test_bootstrap_agrees_with_the_normal_interval():
    values = np.random.default_rng(1).normal(2, 3, 400)
    low, high = bootstrap(values)
    error = values.std(ddof=1) / 20
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=DRAWN * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=DRAWN * error)


def test_comparison_is_paired_and_repeatable():
    mine, theirs = [3.0, 30.0, 300.0], [2.0, 28.0, 297.0]
    paired = compare(mine, theirs)
    assert (paired.n, paired.difference, paired.p) == (3, 2.0, 0.25)
    assert (paired.low, paired.high) == (1.0, 3.0)
    assert paired.error == pytest.approx(1 / math.sqrt(3))  # of 1, 2 and 3, whose standard deviation is 1
    assert compare([2.0], [1.5]).error is None
    assert compare(mine, theirs) == paired


def test_comparison_refuses_unpaired_scores():
    with pytest.raises(ValueError, match="2 and 1"):
        compare([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="0 and 0"):
        compare([], [])


@settings(max_examples=30)
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30))
def test_swapping_sides_mirrors_everything(values):
    zeros = [0.0] * len(values)
    one, other = compare(values, zeros), compare(zeros, values)
    rounded = 30 * 100 * np.finfo(float).eps  # of a sum of at most 30 numbers of at most 100
    assert one.difference == pytest.approx(-other.difference, abs=rounded)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=rounded)
    assert one.p == other.p
    assert 0 < one.p <= 1


def two_stage_variance(parts):
    """Of the mean over samples of their parts' means, when samples and then parts are drawn with replacement."""
    means = [np.mean(values) for values in parts]
    within = np.mean([np.var(values) / len(values) for values in parts])
    return (np.var(means) + within) / len(parts)


@pytest.mark.parametrize("inside", [0.0, 0.5, 3.0])
def test_bootstrap_of_parts_has_the_variance_of_both_stages(inside):
    rng = np.random.default_rng(4)
    parts = [rng.normal(0.3) + inside * rng.normal(size=size) for size in [6] * 30 + [2] * 10]
    low, high = bootstrap_parts([(values, np.ones(len(values))) for values in parts])
    error = math.sqrt(two_stage_variance(parts))
    assert high - low == pytest.approx(2 * 1.96 * error, abs=2 * DRAWN * error)
    assert (low + high) / 2 == pytest.approx(np.mean([values.mean() for values in parts]), abs=2 * DRAWN * error)


def test_parts_weigh_by_their_tokens():
    """Two samples with constant parts: every resample's mean is one of 1, 2 and their middle, whatever the weights."""
    low, high = bootstrap_parts([(np.array([1.0, 1.0]), np.array([9.0, 1.0])), (np.array([2.0]), np.array([4.0]))])
    assert (low, high) == (1.0, 2.0)
    part = np.array([0.0, 1.0]), np.array([3.0, 1.0])  # one sample: both parts, or one of them twice
    assert compare([0.25], [0.0], [part]).difference == 0.25
    assert bootstrap_parts([part], level=0.25) == (0.25, 0.25)  # half of the resamples draw both parts
