"""Whether a difference is more than chance: paired bootstrap intervals and paired sign-flip tests, seeds fixed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
SEED = 0
SIGNIFICANT = 0.05
MOST_EXACT = 12  # differences whose 2^n sign patterns are all tried
PER_CHUNK = 2_000_000  # random numbers held at once

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """One policy against another on the same samples."""

    n: int  # samples that both have scores for
    difference: float  # mean of mine minus theirs
    error: float | None  # its standard error; None for a single sample
    low: float  # ends of its 95 % bootstrap interval
    high: float
    p: float  # probability of a mean at least as far from 0 when the sign of each difference is a coin's

    @property
    def certain(self) -> bool:
        """Whether it is more than chance: its interval and its test exclude 0."""
        return (self.low > 0 or self.high < 0) and self.p < SIGNIFICANT


def mean_and_error(scores: Sequence[float] | Vector) -> tuple[float, float | None]:
    """Return the mean and its standard error, which a single score has none of."""
    values = np.asarray(scores, dtype=np.float64)
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return float(values.mean()), error


def compare(
    mine: Sequence[float], theirs: Sequence[float], parts: Sequence[tuple[Vector, Vector]] | None = None
) -> Paired:
    """Compare scores of the same samples, in the same order.

    Args:
        mine: scores of one policy.
        theirs: scores of the other.
        parts: of each sample the differences of its parts, such as blocks of a book, and their weights; the interval is
            then that of :func:`bootstrap_parts`. None means that samples have no parts.
    """
    differences = np.subtract(np.asarray(mine, np.float64), np.asarray(theirs, np.float64))
    if len(mine) != len(theirs) or not len(differences):
        raise ValueError(f"{len(mine)} and {len(theirs)} scores: expected as many, and at least one")
    low, high = bootstrap(differences) if parts is None else bootstrap_parts(parts)
    return Paired(len(differences), *mean_and_error(differences), low, high, float(sign_flips(differences[None])[0]))


def bootstrap(differences: Vector, level: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of the mean of differences ``[n]``, from 10,000 resamples with replacement."""
    return _interval([weights @ differences for weights in _drawn(_resampled, len(differences))], level)


def bootstrap_parts(parts: Sequence[tuple[Vector, Vector]], level: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of the mean over samples of their parts' weighted means.

    Each of 10,000 resamples draws samples with replacement, and within each drawn one its parts: parts of one sample
    are alike, so that samples and not parts say how much there is to know.

    Args:
        parts: of each sample its parts' differences ``[k]`` and weights ``[k]``.
        level: confidence level of the interval.
    """
    n, counts = len(parts), np.array([len(values) for values, _ in parts])
    values, weights = (
        np.stack([np.pad(pair[which], (0, counts.max() - len(pair[which]))) for pair in parts]) for which in (0, 1)
    )
    generator = np.random.default_rng(SEED)
    means = []
    for rows in _chunks(n * int(counts.max())):
        drawn = generator.integers(0, n, (rows, n))[..., None]
        inside = (generator.random((rows, n, int(counts.max()))) * counts[drawn]).astype(np.int64)
        weight = weights[drawn, inside] * (np.arange(counts.max()) < counts[drawn])
        means.append(((values[drawn, inside] * weight).sum(-1) / weight.sum(-1)).mean(-1))
    return _interval(means, level)


def _interval(means: Sequence[Vector], level: float) -> tuple[float, float]:
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def sign_flips(differences: Vector) -> Vector:
    """Return the two-sided p-values ``[K]`` of the means of differences ``[K, n]`` when each sign is a coin's.

    All 2^n patterns are tried for up to 12 differences; else 10,000 random ones, and the observed pattern counts as
    one of them, so that p is never 0 (Phipson and Smyth, 2010).
    """
    n = differences.shape[1]
    observed = np.abs(differences.sum(1)) * (1 - 1e-12)  # the same sum in another order may round a little lower
    if n <= MOST_EXACT:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=n))).reshape(2**n, n)
        return np.asarray((np.abs(signs @ differences.T) >= observed).mean(0), np.float64)
    reached = sum((np.abs(signs @ differences.T) >= observed).sum(0) for signs in _drawn(_signs, n))
    return np.asarray((reached + 1) / (RESAMPLES + 1), np.float64)


def _signs(n: int) -> Iterator[Vector]:
    """Yield random signs ``[10,000, n]`` in chunks."""
    generator = np.random.default_rng(SEED)
    for rows in _chunks(n):
        signs = generator.integers(0, 2, (rows, n), dtype=np.int8).astype(np.float64)
        yield 2 * signs - 1


def _resampled(n: int) -> Iterator[Vector]:
    """Yield how often each of 10,000 resamples ``[10,000, n]`` has each sample, over n, in chunks."""
    generator = np.random.default_rng(SEED)
    for rows in _chunks(n):
        drawn = generator.integers(0, n, (rows, n)) + n * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * n).astype(np.float64)
        counts /= n
        yield counts.reshape(rows, n)


def _drawn(draw: Callable[[int], Iterator[Vector]], n: int) -> Iterable[Vector]:
    """Return what is drawn for n samples: the same for every difference of as many, so kept where it fits a chunk."""
    return _kept(draw, n) if n * RESAMPLES <= PER_CHUNK else draw(n)


@lru_cache(maxsize=16)
def _kept(draw: Callable[[int], Iterator[Vector]], n: int) -> tuple[Vector, ...]:
    return tuple(draw(n))


def _chunks(n: int) -> Iterator[int]:
    """Split the resamples into parts that fit in memory."""
    size = max(1, PER_CHUNK // n)
    for start in range(0, RESAMPLES, size):
        yield min(size, RESAMPLES - start)
