"""Tests of which shares keep the mean cost below a bound, with a confidence that holds for any distribution.

The cost of a row is what a policy loses on it against the full cache, clipped to ``[-clip, clip]``. Rows are
independent draws of one distribution. A wager tests the hypothesis that the mean of clipped costs is at least ``loss``:
it starts with 1 and bets, before each row, a part of its capital on a cost below ``loss``. Under the hypothesis the
capital is a supermartingale, so that it ever reaches ``1 / level`` with probability at most ``level`` (Ville's
inequality; Waudby-Smith and Ramdas, 2023, https://arxiv.org/abs/2010.09686). This holds at every row: a test may stop
at any time. Beside ``loss`` a grid of larger means is tested. Means are refuted from the largest down, and the smallest
that is refuted is an upper bound. If it is wrong, the wager against the largest mean of the grid below the true one has
won: one event, whose probability is at most ``level``.

The shares of a policy are tested from large to small up to the first that is not shown to hold (fixed-sequence
testing), and ``1 - confidence`` is divided among the policies (Bonferroni). The probability that any share is wrongly
said to hold is then at most ``1 - confidence`` (Angelopoulos et al., Learn then Test, 2021,
https://arxiv.org/abs/2110.01052). The policies and shares to test are chosen on other rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

CAP = 0.95  # largest part of the capital that a row of the largest cost takes
#: Each bet is computed as if half a row of the largest cost had been seen already; this keeps early bets small.
IMAGINED = 0.5
CLEAR = 2  # standard errors above the bound at which the mean cost is clearly too high
FEWEST = 10  # test rows before a trial may be given up
SPENT = 2 / 3  # part of the test rows that would suffice if none cost anything
GRID = 100  # tested means from the bound of the cost to the largest cost

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """Number, sum and sum of squares of costs."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def plus(self, cost: float) -> Moments:
        """Return the moments with one more cost."""
        return Moments(self.count + 1, self.total + cost, self.squares + cost * cost)

    def mean(self, errors: float = 0.0) -> float:
        """Return the mean plus a number of standard errors of it; the error of a single cost is 0."""
        mean = self.total / self.count
        variance = max(0.0, self.squares - self.count * mean**2) / max(1, self.count - 1)
        return mean + errors * math.sqrt(variance / self.count)


def growth(cost: float, moments: Moments, loss: Vector, clip: float) -> Vector:
    """Return by how much a row changes the log of a wager's capital, for each tested mean ``loss``.

    The bet is the approximate growth-optimal one for the rows before it (aGRAPA; Waudby-Smith and Ramdas, 2023,
    appendix B.3) and half a row of the largest cost, which an early bet would otherwise ignore.

    Args:
        cost: clipped cost of the row.
        moments: of the rows before it, and of the search rows.
        loss: tested means ``[n]``, below ``clip``.
        clip: largest cost.
    """
    # A row adds log(1 + bet * x) to the log of the capital, with x = loss - cost: about bet * x - (bet * x)^2 / 2.
    # Summed over the rows this is largest at bet = first / second, the sum of x by the sum of x^2.
    first = moments.count * loss - moments.total + IMAGINED * (loss - clip)
    second = moments.count * loss**2 - 2 * loss * moments.total + moments.squares + IMAGINED * (loss - clip) ** 2
    bet = np.minimum(np.maximum(first / second, 0.0), CAP / (clip - loss))
    return np.log1p(bet * (loss - cost))


def rows_needed(loss: float, clip: float, level: float) -> int:
    """Return the smallest number of test rows that can show a mean cost below ``loss``, if no row costs anything.

    Fewer rows cannot exclude that rare rows of the largest cost have a mean of ``loss``.
    """
    return math.ceil(-math.log(level) / math.log1p(CAP * loss / (clip - loss)))


def least_loss(num_rows: int, clip: float, level: float) -> float:
    """Return the smallest ``loss`` that so many test rows, at least one, can show, if no row costs anything."""
    odds = math.expm1(-math.log(level) / num_rows) / CAP
    return clip * odds / (1 + odds)


def policies_allowed(loss: float, clip: float, confidence: float, num_rows: int) -> int:
    """Return how many policies a test of so many rows may have: at least 1.

    The confidence is divided among them. Rows without a cost then show each in two thirds of the rows, so that there is
    room for some costs.
    """
    largest = math.log(1 - confidence) + SPENT * num_rows * math.log1p(CAP * loss / (clip - loss))
    return max(1, int(math.exp(min(largest, 10.0))))


@dataclass
class Trial:
    """What is known of one policy at one share."""

    share: float
    search: list[float] = field(default_factory=list)  # clipped costs of the search rows
    costs: list[float] = field(default_factory=list)  # clipped costs of the test rows, in their order
    moments: Moments = Moments()  # of all these costs
    capital: Vector = field(default_factory=lambda: np.zeros(GRID))  # log of each wager's capital
    largest: Vector = field(default_factory=lambda: np.zeros(GRID))  # the largest that it was
    crossed: bool = False  # whether all tested means are refuted, and the mean cost is below the last one, the bound
    stopped: bool = False  # whether no further row is measured
    kept: float = 0.0  # share that the search rows kept, where protected tokens exceeded ``share``; 0: they did not

    @property
    def size(self) -> float:
        """The share that policies are compared by: what is kept, where that is more than was asked for."""
        return max(self.share, self.kept)

    def add_search(self, cost: float) -> None:
        """Add the clipped cost of a search row."""
        self.search.append(cost)
        self.moments = self.moments.plus(cost)

    def add_test(self, cost: float, means: Vector, clip: float) -> None:
        """Add the clipped cost of a test row, and what the wager against each mean wins or loses by it."""
        self.capital = self.capital + growth(cost, self.moments, means, clip)
        self.largest = np.maximum(self.largest, self.capital)
        self.costs.append(cost)
        self.moments = self.moments.plus(cost)

    def num_refuted(self, level: float) -> int:
        """Return the number of tested means that are refuted, from the largest down to the first that is not."""
        refuted = self.largest >= -math.log(level)
        return GRID if refuted.all() else int(refuted.argmin())


def promising(trials: Sequence[Sequence[Trial]], loss: float, max_policies: int) -> list[list[Trial]]:
    """Choose by the search rows what to test: of each policy its first shares, perhaps none.

    A share may hold if its mean cost, less the standard error, is at most ``loss``. It is likely to hold if the mean
    plus the standard error is. A policy is left out if none of its shares may hold, or if a smaller
    :attr:`Trial.size` than each of these is likely to hold under another policy. If more than ``max_policies`` are
    left, those with the smallest sizes that are likely to hold stay, and of equal sizes the cheapest.

    Args:
        trials: by policy, each from the largest share to the smallest.
        loss: the tested mean.
        max_policies: largest number of policies that are tested.
    """
    likely = [_first(policy_trials, lambda trial: trial.moments.mean(errors=1) <= loss) for policy_trials in trials]
    smallest = min((trial.size for policy_trials in likely for trial in policy_trials), default=1.0)
    may = [_first(policy_trials, lambda trial: trial.moments.mean(errors=-1) <= loss) for policy_trials in trials]
    kept = [policy_trials if policy_trials and policy_trials[-1].size <= smallest else [] for policy_trials in may]

    def rank(index: int) -> tuple[bool, float, float]:
        last = (likely[index] or kept[index] or trials[index])[-1]
        return not kept[index], last.size if likely[index] else 1.0, last.moments.mean()

    best = sorted(range(len(trials)), key=rank)[:max_policies]
    return [policy_trials if index in best else [] for index, policy_trials in enumerate(kept)]


def _first(trials: Sequence[Trial], holds: Callable[[Trial], bool]) -> list[Trial]:
    """Return the trials before the first for which something does not hold."""
    return [*itertools.takewhile(holds, trials)]


@dataclass
class SharesTest:
    """The test of several policies at several shares, row by row.

    Attributes:
        trials: what is tested, by policy, each from the largest share to the smallest.
        loss: the bound that mean costs are tested against.
        clip: largest cost.
        confidence: probability that no share is wrongly said to hold.
        num_rows: rows that the test may read.
    """

    trials: list[list[Trial]]
    loss: float
    clip: float
    confidence: float
    num_rows: int

    @property
    def level(self) -> float:
        """Probability of an error for each policy."""
        return (1 - self.confidence) / max(1, len(self.trials))

    @property
    def means(self) -> Vector:
        """Tested mean costs, from just below the largest cost down to :attr:`loss`."""
        return np.linspace(self.clip, self.loss, GRID + 1)[1:]

    @property
    def running(self) -> list[Trial]:
        """The trials whose cost of the next row is needed."""
        return [trial for policy_trials in self.trials for trial in policy_trials if not trial.stopped]

    def add(self, costs: Sequence[float]) -> None:
        """Take the clipped costs of the next row, one for each of :attr:`running`, and stop what is decided.

        To stop a trial that is not shown to hold never makes an error more likely.
        """
        means = self.means
        for trial, cost in zip(self.running, costs, strict=True):
            trial.add_test(cost, means, self.clip)
            trial.crossed = trial.stopped = trial.num_refuted(self.level) == GRID
        for policy_trials in self.trials:
            given_up = next(
                (i for i, trial in enumerate(policy_trials) if self._is_hopeless(trial)), len(policy_trials)
            )
            for trial in policy_trials[given_up:]:
                trial.stopped = True
        best = min((trial.size for policy_trials in self.trials for trial in self.holding(policy_trials)), default=1.0)
        for policy_trials in self.trials:
            possible = _first(policy_trials, lambda trial: trial.crossed or not trial.stopped)
            if not possible or possible[-1].size > best:
                for trial in policy_trials:
                    trial.stopped = True

    def _is_hopeless(self, trial: Trial) -> bool:
        """Whether a trial is not expected to cross: its mean is too high, or too few rows are left."""
        if trial.crossed or len(trial.costs) < FEWEST:
            return False
        largest_gain = self.loss - min(0.0, trial.moments.mean(errors=-CLEAR))
        left = (self.num_rows - len(trial.costs)) * math.log1p(CAP * largest_gain / (self.clip - self.loss))
        out_of_reach = trial.capital[-1] + left < -math.log(self.level)
        return out_of_reach or trial.moments.mean(errors=-CLEAR) > self.loss

    def holding(self, policy_trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials of a policy that are shown to hold: those before the first that did not cross."""
        return _first(policy_trials, lambda trial: trial.crossed)

    def bounds(self, policy_trials: Sequence[Trial]) -> list[float | None]:
        """Return a bound of each mean cost of a policy; with the stated confidence all bounds of all policies hold.

        A share that holds has the bound ``loss``, and the first one that does not has the smallest mean that its wagers
        refute; behind it there is none (Hsu and Berger, Stepwise confidence intervals without multiplicity adjustment,
        1999).
        """
        num_holding, means = len(self.holding(policy_trials)), [self.clip, *self.means.tolist()]
        tested = policy_trials[: num_holding + 1]
        return [means[x.num_refuted(self.level)] for x in tested] + [None] * (len(policy_trials) - len(tested))
