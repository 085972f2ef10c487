"""What a comparison says first: who is best at a share of the memory, by how much, and how far from the full cache."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ag.evaluate.comparison.result import Comparison, Result, at_budget, hold_alike, pair
from ag.evaluate.comparison.statistics import SIGNIFICANT, Paired

HALF = 0.5
LETTERS = 120  # of the reason why a policy has no result, which its summary has in full
LOST = 0.5  # of what the full cache scores above its floor: more is far
HALVED = math.log(2)  # nats: a token of the right answer is half as likely


def verdicts(comparison: Comparison) -> list[Finding]:
    """Return what there is to say of each task and budget, the budget nearest half the memory first."""
    found: list[Finding] = []
    for task in comparison.tasks:
        if remark := comparison.uninformative(task):
            found.append(Finding(task, "", [f"{task}: no verdict, {remark}"]))
            continue
        for budget in sorted(comparison.budgets, key=_from_half) or [""]:
            if any(result.evicts for result in comparison.at(task, budget)):
                found.append(judge(comparison, task, budget))
    return found


def headlines(found: Sequence[Finding]) -> list[Finding]:
    """Return the first verdict of each task."""
    return list({one.task: one for one in reversed(found)}.values())[::-1]


@dataclass(frozen=True)
class Finding:
    """What there is to say of a task at a budget; without ``best`` there is no verdict.

    Where the best one has gates, rivals are the policies without: gates beside gates are one method. With a single
    policy the rival is what does not evict.
    """

    task: str
    budget: str  # as it is written; empty: policies without one
    sentences: list[str]  # without full stops
    left_out: Sequence[str] = ()  # policies that take no part, each with the reason
    best: Result | None = None  # the policy with the best mean
    rival: Result | None = None  # the best of its rivals
    gain: Paired | None = None  # how much better ``best`` is than ``rival``, above 0 where it is
    level: Sequence[str] = ()  # other policies at this budget that cannot be told from the best one
    from_full: Sequence[Distance] = ()  # of the best policy and its rival; empty without a result of the full cache

    @property
    def certain(self) -> bool:
        """Whether a difference is more than chance."""
        return self.gain is not None and self.gain.certain

    def __str__(self) -> str:
        return ". ".join(self.sentences)


@dataclass(frozen=True)
class Distance:
    """How far a policy is from the full cache on the same samples."""

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
        text = f"{self.result.summary.label}, {_ahead(self.gain, self.unit, self.full.summary.label)}"
        return text if self.gain.certain else f"{text}, which may be chance (p = {self.gain.p:.3f})"

    @property
    def scores(self) -> str:
        """Both mean scores and their difference, where nats judge; else empty."""
        if self.score is None:
            return ""
        means = " against ".join(f"{one.summary.mean:.3f}" for one in (self.result, self.full))
        ends = f"[{self.score.low:.3f}, {self.score.high:.3f}]"
        return f"{self.full.summary.metric} {means}, {self.score.difference:+.3f} {ends}"


def judge(comparison: Comparison, task: str, budget: str) -> Finding:
    """Compare the best policy of a task at a budget with the best of its rivals, or say why that cannot be.

    Those take part that hold equally much; see :func:`ag.evaluate.comparison.result.at_budget`.
    """
    results = comparison.of_task(task)
    tag = "nats" if any(result.nats is not None for result in results) else ""  # what judges; empty: the score
    known = [result for result in results if result.outcomes and (not tag or result.nats is not None)]
    compared = at_budget(known, budget)
    absent = [one for one in comparison.at(task, budget) if not any(one is other for other in compared)]
    reasons = {one.summary.label: reason for one in absent if (reason := _reason(one, tag))}
    left_out = [f"{label} ({reason})" for label, reason in reasons.items()]
    last = [f"Left out: {', '.join(left_out)}"] if left_out else []
    where = f"{_where(budget)}, {task}"

    def without(reason: str) -> Finding:
        return Finding(task, budget, [f"{where if budget else task}: no verdict, {reason}", *last], left_out)

    if not compared:
        return without("no policy has a result at this budget")
    lower = bool(tag) or not all(result.summary.higher_is_better for result in known)

    def better(result: Result, other: Result) -> Paired | None:
        """Return how much better a result is than another, above 0 where it is; None where they share no sample."""
        return pair(other, result, tag) if lower else pair(result, other, tag)

    best, *others = sorted(compared, key=lambda one: _mean(one, tag), reverse=not lower)
    alike = [one for one in others if hold_alike(best, one)]
    full = next((one for one in known if not one.evicts), None)
    rival = next((one for one in alike if not (best.is_gated and one.is_gated)), full)
    gain = None if rival is None else better(best, rival)
    if rival is None or gain is None:
        return without(f"there is nothing to compare {compared[0].summary.label} with")
    unit = "nats" if tag or best.summary.metric.startswith("nats") else f"in {best.summary.metric}"
    gains = [(one.summary.label, better(best, one)) for one in alike]
    from_full = [
        Distance(one, full, lost, unit, pair(one, full) if tag else None)
        for one in (best, rival)
        if full is not None and one.evicts and (lost := better(one, full)) is not None
    ]
    level = [label for label, other in gains if other and (other.low <= 0 or other.p >= SIGNIFICANT)]
    sentences = [f"{where}: {_compared(best, rival, gain, unit, level)}", *_against_full(from_full, rival), *last]
    return Finding(task, budget, sentences, left_out, best, rival, gain, level, from_full)


def _where(budget: str) -> str:
    """Say at which memory policies are compared."""
    if not budget:
        return "At the share that it keeps"
    if "." not in budget:
        return f"With {budget} tokens a head"
    return "At half the memory" if float(budget) == HALF else f"At {100 * float(budget):g} % of the memory"


def _compared(best: Result, rival: Result, gain: Paired, unit: str, level: Sequence[str]) -> str:
    """Say who is best and by how much, or that it cannot be told."""
    others = ", ".join(name for name in level if gain.certain or name != rival.summary.label)
    how = f"(n = {gain.n}, p {'< 0.001' if gain.p < 0.001 else f'= {gain.p:.3f}'})"
    if gain.certain:
        lead = _ahead(gain, unit, rival.summary.label)
        return f"{best.summary.label}, {lead} {how}" + (others and f"; level with it: {others}")
    between = f"{gain.difference:+.3f} {unit} [{gain.low:.3f}, {gain.high:.3f}] {how}"
    said = f"{best.summary.label} cannot be told from {rival.summary.label}, {between}"
    return said + (others and f", nor from {others}")


def _against_full(found: Sequence[Distance], rival: Result) -> list[str]:
    """Say how far the best policy is from the full cache, and whether it and its rival are far; or nothing."""
    if not found:
        return ["The full cache has no result to compare with"]
    mine = found[0]
    known = rival is mine.full  # the first sentence says it
    words = "both are far from the full cache" if len(found) > 1 else "it is far from the full cache"
    parts = ["" if known else str(mine), mine.scores, words if all(one.is_far for one in found) else ""]
    return ["; ".join(filter(None, parts))] if any(parts) else []


def _reason(result: Result, tag: str) -> str:
    """Say why a result is not compared; empty for the full cache, which every other one is held against."""
    if not result.outcomes:
        return f"no result: {textwrap.shorten(result.summary.problem or 'no samples', LETTERS, placeholder=' ...')}"
    if tag and result.nats is None:
        return "its nats were not measured"
    return f"it holds {result.summary.kept:.1%} of the prompt" if result.evicts else ""


def _mean(result: Result, tag: str) -> float:
    measured = result.measure(tag)
    assert measured is not None  # results with outcomes have one
    return measured[1]


def _from_half(budget: str) -> float:
    """Order budgets: shares by their distance from a half, then tokens from the most on."""
    return abs(float(budget) - HALF) if "." in budget else 1 + 1 / float(budget)


def _ahead(gain: Paired, unit: str, other: str) -> str:
    """Say how far a policy is ahead of another or behind it, with the interval."""
    word, low, high = ("behind", -gain.high, -gain.low) if gain.difference < 0 else ("ahead of", gain.low, gain.high)
    return f"{abs(gain.difference):.3f} {unit} {word} {other} [{low:.3f}, {high:.3f}]"
