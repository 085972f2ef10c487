"""Paired bootstrap intervals and paired sign-flip tests, with fixed seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
SEED = 0
SIGNIFICANT = 0.05
MAX_EXACT = 12  # most differences whose 2^n sign patterns are all tried
PER_CHUNK = 2_000_000  # random numbers in memory at once

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """The paired difference of two policies."""

    n: int  # samples with scores of both
    difference: float  # mean of the first policy's scores minus the second's
    error: float | None  # its standard error; None for a single sample
    low: float  # ends of its 95 % bootstrap interval; NaN for a single sample
    high: float
    p: float  # two-sided p-value under random sign flips, see sign_flips

    @property
    def certain(self) -> bool:
        """Whether the difference is more than chance: both interval and test exclude 0."""
        return (self.low > 0 or self.high < 0) and self.p < SIGNIFICANT


def mean_and_error(scores: Sequence[float] | Vector) -> tuple[float, float | None]:
    """Return the mean and its standard error, None for a single score."""
    values = np.asarray(scores, dtype=np.float64)
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return float(values.mean()), error


def compare(
    scores: Sequence[float], other_scores: Sequence[float], parts: Sequence[tuple[Vector, Vector]] | None = None
) -> Paired:
    """Compare two lists of scores, of equal samples in equal order.

    The interval is of the differences, or of the ``parts`` of each sample (blocks of a book), their differences and
    weights; see :func:`bootstrap_parts`.
    """
    differences = np.subtract(np.asarray(scores, np.float64), np.asarray(other_scores, np.float64))
    if len(scores) != len(other_scores) or not len(differences):
        raise ValueError(f"{len(scores)} and {len(other_scores)} scores: expected as many, and at least one")
    low = high = math.nan
    if len(differences) > 1:
        low, high = bootstrap(differences) if parts is None else bootstrap_parts(parts)
    return Paired(len(differences), *mean_and_error(differences), low, high, float(sign_flips(differences[None])[0]))


def interval_text(low: float, high: float, form: str) -> str:
    """Return an interval in brackets after a space; empty for NaN, the interval of a single sample."""
    return "" if math.isnan(low) else f" [{low:{form}}, {high:{form}}]"


def bootstrap(differences: Vector, level: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of the mean of differences ``[n]``, from 10,000 resamples with replacement."""
    n, generator = len(differences), np.random.default_rng(SEED)
    return _interval([differences[generator.integers(0, n, (rows, n))].mean(1) for rows in _chunks(n)], level)


def bootstrap_parts(parts: Sequence[tuple[Vector, Vector]], level: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of the mean over samples of their parts' weighted means.

    Each of 10,000 resamples draws samples with replacement, then parts within each sample. Parts of one sample depend
    on each other: the number of samples sets the width of the interval. ``parts`` are the differences ``[k]`` and
    weights ``[k]`` of the parts of each sample.
    """
    n, counts = len(parts), np.array([len(values) for values, _ in parts])
    max_count = int(counts.max())
    values, weights = (
        np.stack([np.pad(pair[which], (0, max_count - len(pair[which]))) for pair in parts]) for which in (0, 1)
    )
    generator, means = np.random.default_rng(SEED), []
    for rows in _chunks(n * max_count):
        sampled = generator.integers(0, n, (rows, n))[..., None]
        inside = (generator.random((rows, n, max_count)) * counts[sampled]).astype(np.int64)
        weight = weights[sampled, inside] * (np.arange(max_count) < counts[sampled])
        means.append(((values[sampled, inside] * weight).sum(-1) / weight.sum(-1)).mean(-1))
    return _interval(means, level)


def _interval(means: Sequence[Vector], level: float) -> tuple[float, float]:
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def sign_flips(differences: Vector) -> Vector:
    """Return the two-sided p-values ``[K]`` of the means of differences ``[K, n]`` under random sign flips.

    All 2^n patterns are tried for up to 12 differences, else 10,000 random patterns. The observed pattern counts as a
    random one: p is never 0 (Phipson and Smyth, 2010).
    """
    n = differences.shape[1]
    observed = np.abs(differences.sum(1)) * (1 - 1e-12)  # an equal sum in another order may round a little lower
    if n <= MAX_EXACT:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=n))).reshape(2**n, n)
        return np.asarray((np.abs(signs @ differences.T) >= observed).mean(0), np.float64)
    generator, num_extreme = np.random.default_rng(SEED), np.zeros(len(differences))
    for rows in _chunks(n):
        signs = 2.0 * generator.integers(0, 2, (rows, n), dtype=np.int8) - 1
        num_extreme += (np.abs(signs @ differences.T) >= observed).sum(0)
    return np.asarray((num_extreme + 1) / (RESAMPLES + 1), np.float64)


def _chunks(n: int) -> Iterator[int]:
    """Yield sizes of chunks of the resamples that fit in memory."""
    size = max(1, PER_CHUNK // n)
    for start in range(0, RESAMPLES, size):
        yield min(size, RESAMPLES - start)
