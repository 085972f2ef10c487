"""How far a policy is from the full cache on the same samples, in numbers and in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ag.evaluate.comparison.result import Result, pair
from ag.evaluate.comparison.statistics import Paired

LOST = 0.5  # of what the full cache scores above its floor: more is far
HALVED = math.log(2)  # nats: a token of the right answer is half as likely


@dataclass(frozen=True)
class Distance:
    """A policy against the full cache."""

    result: Result
    full: Result
    gain: Paired  # how much better it is in what judges it, the score or nats; below 0 where it is behind
    unit: str  # of the gain
    score: Paired | None  # its score minus that of the full cache, where nats judge

    @property
    def is_far(self) -> bool:
        """Whether much is lost: half of the score above the floor, or ln 2 nats a token, and more than chance."""
        mine, best = self.result.summary, self.full.summary
        scored = self.score or (self.gain if best.higher_is_better else None)
        if best.higher_is_better and scored is not None and scored.certain:
            assert mine.mean is not None and best.mean is not None  # both have samples
            if best.mean - mine.mean > LOST * (best.mean - (best.floor or 0.0)):
                return True
        return self.unit == "nats" and -self.gain.difference > HALVED and self.gain.certain

    def __str__(self) -> str:
        text = f"{self.result.summary.label}, {ahead(self.gain, self.unit, self.full.summary.label)}"
        return text if self.gain.certain else f"{text}, which may be chance (p = {self.gain.p:.3f})"

    @property
    def scores(self) -> str:
        """Both mean scores and their difference, where nats judge; else empty."""
        if self.score is None:
            return ""
        means = " against ".join(f"{one.summary.mean:.3f}" for one in (self.result, self.full))
        ends = f"[{self.score.low:.3f}, {self.score.high:.3f}]"
        return f"{self.full.summary.metric} {means}, {self.score.difference:+.3f} {ends}"


def distance(result: Result, full: Result | None, nats: bool, lower: bool, unit: str) -> Distance | None:
    """Compare a policy with the full cache; None where either has no result, or the policy is the full cache."""
    if full is None or not result.evicts:
        return None
    gain = better(result, full, nats, lower)
    return None if gain is None else Distance(result, full, gain, unit, pair(result, full) if nats else None)


def better(result: Result, other: Result, nats: bool, lower: bool) -> Paired | None:
    """Return how much better a result is than another, above 0 where it is; None where they share no sample."""
    return pair(other, result, nats) if lower else pair(result, other, nats)


def ahead(gain: Paired, unit: str, other: str) -> str:
    """Say how far a policy is ahead of another or behind it, with the interval."""
    word, low, high = ("behind", -gain.high, -gain.low) if gain.difference < 0 else ("ahead of", gain.low, gain.high)
    return f"{abs(gain.difference):.3f} {unit} {word} {other} [{low:.3f}, {high:.3f}]"
