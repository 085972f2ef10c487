"""The verdict: which policy is best at a share of the memory, by how much, and how far from the full cache."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ag.evaluate.comparison.result import Comparison, Result, at_budget, hold_alike, pair
from ag.evaluate.comparison.statistics import SIGNIFICANT, Paired

HALF = 0.5
LETTERS = 120  # to which the reason of a failed cell is cut; its summary has all of it
LOST = 0.5  # a policy is far from the full cache if it loses more of the score above the floor
HALVED = math.log(2)  # or more nats per token: a token of the right answer is half as likely


@dataclass(frozen=True)
class Finding:
    """The verdict of a task at a budget; ``best`` is None where there is none.

    Where the best policy has gates, its rivals are the policies without: gates beside gates are one method. The rival
    of a single policy is the full cache.
    """

    task: str
    budget: str  # as text; empty for policies without a budget
    sentences: list[str]  # without full stops
    best: Result | None = None  # the policy with the best mean
    rival: Result | None = None  # the best of its rivals
    gain: Paired | None = None  # of ``best`` over ``rival``; above 0 means better

    @property
    def certain(self) -> bool:
        """Whether the gain is more than chance."""
        return self.gain is not None and self.gain.certain

    def __str__(self) -> str:
        return ". ".join(self.sentences)


def verdicts(comparison: Comparison) -> list[Finding]:
    """Return the verdict of each task and budget, the budget nearest half the memory first."""
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


def judge(comparison: Comparison, task: str, budget: str) -> Finding:
    """Compare the best policy of a task at a budget with the best of its rivals, or say why that is impossible.

    Policies are compared that hold equally much; see :func:`ag.evaluate.comparison.result.at_budget`. Nats decide where
    they were measured, else the score.
    """
    results = comparison.of_task(task)
    tag = "nats" if any(result.nats is not None for result in results) else ""
    known = [result for result in results if result.outcomes and (not tag or result.nats is not None)]
    compared = at_budget(known, budget)
    absent = [one for one in comparison.at(task, budget) if not any(one is other for other in compared)]
    reasons = {one.summary.label: reason for one in absent if (reason := _reason(one, tag))}
    last = [f"Left out: {', '.join(f'{label} ({reason})' for label, reason in reasons.items())}"] if reasons else []
    where = f"{_where(budget)}, {task}"

    def without(reason: str) -> Finding:
        return Finding(task, budget, [f"{where if budget else task}: no verdict, {reason}", *last])

    if not compared:
        return without("no policy has a result at this budget")
    lower = bool(tag) or not compared[0].summary.higher_is_better
    best, *others = sorted(compared, key=lambda one: (one.measure(tag) or (0, 0))[1], reverse=not lower)
    alike = [one for one in others if hold_alike(best, one)]
    full = next((one for one in known if not one.evicts), None)
    rival = next((one for one in alike if not (best.is_gated and one.is_gated)), full)
    gain = None if rival is None else _better(best, rival, tag)
    if rival is None or gain is None:
        return without(f"there is nothing to compare {compared[0].summary.label} with")
    unit = "nats" if tag or best.summary.metric.startswith("nats") else f"in {best.summary.metric}"
    gains = [(one.summary.label, _better(best, one, tag)) for one in alike]
    level = [label for label, other in gains if other and (other.low <= 0 or other.p >= SIGNIFICANT)]
    sentences = [f"{where}: {_compared(best, rival, gain, unit, level)}", *_from_full(best, rival, full, tag, unit)]
    return Finding(task, budget, [*sentences, *last], best, rival, gain)


def _better(one: Result, other: Result, tag: str) -> Paired | None:
    """Return how much better a result is than another, above 0 where it is; None if they have no sample in common."""
    lower = tag or not one.summary.higher_is_better
    return pair(other, one, tag) if lower else pair(one, other)


def _where(budget: str) -> str:
    """Return the memory at which policies are compared, in words."""
    if not budget:
        return "At the share that it keeps"
    if "." not in budget:
        return f"With {budget} tokens a head"
    return "At half the memory" if float(budget) == HALF else f"At {100 * float(budget):g} % of the memory"


def _compared(best: Result, rival: Result, gain: Paired, unit: str, level: Sequence[str]) -> str:
    """Return which policy is best and by how much, or that it is no better than others."""
    others = ", ".join(name for name in level if gain.certain or name != rival.summary.label)
    how = f"(n = {gain.n}, p {'< 0.001' if gain.p < 0.001 else f'= {gain.p:.3f}'})"
    if gain.certain:
        lead = _ahead(gain, unit, rival.summary.label)
        return f"{best.summary.label}, {lead} {how}" + (others and f"; level with it: {others}")
    between = f"{gain.difference:+.3f} {unit} [{gain.low:.3f}, {gain.high:.3f}] {how}"
    said = f"{best.summary.label} cannot be told from {rival.summary.label}, {between}"
    return said + (others and f", nor from {others}")


def _from_full(best: Result, rival: Result, full: Result | None, tag: str, unit: str) -> list[str]:
    """Return a sentence on the distance of the best policy, and its rival, to the full cache; empty if it says nothing.

    Where nats decide, it has both mean scores and their difference too.
    """
    pairs = [(one, full, _better(one, full, tag)) for one in (best, rival) if full is not None and one.evicts]
    known = [(one, other, lost) for one, other, lost in pairs if lost is not None]
    if not known:
        return ["The full cache has no result to compare with"]
    mine, other, lost = known[0]
    parts = []
    if rival is not other:  # else the first sentence has this difference
        chance = "" if lost.certain else f", which may be chance (p = {lost.p:.3f})"
        parts.append(f"{mine.summary.label}, {_ahead(lost, unit, other.summary.label)}{chance}")
    if tag and (score := pair(mine, other)) is not None:
        means = f"{other.summary.metric} {mine.summary.mean:.3f} against {other.summary.mean:.3f}"
        parts.append(f"{means}, {score.difference:+.3f} [{score.low:.3f}, {score.high:.3f}]")
    if all(_is_far(*one, tag, unit) for one in known):
        parts.append(f"{'both are' if len(known) > 1 else 'it is'} far from the full cache")
    return ["; ".join(parts)] if parts else []


def _is_far(result: Result, full: Result, lost: Paired, tag: str, unit: str) -> bool:
    """Whether a policy loses half of the score above the floor, or ln 2 nats per token, by more than chance."""
    mine, best = result.summary, full.summary
    if best.higher_is_better and mine.mean is not None and best.mean is not None:
        score = pair(result, full) if tag else lost
        if score and score.certain and best.mean - mine.mean > LOST * (best.mean - (best.floor or 0.0)):
            return True
    return unit == "nats" and -lost.difference > HALVED and lost.certain


def _reason(result: Result, tag: str) -> str:
    """Return why a result is not compared; empty for the full cache, with which every other one is compared."""
    if not result.outcomes:
        return f"no result: {textwrap.shorten(result.summary.problem or 'no samples', LETTERS, placeholder=' ...')}"
    if tag and result.nats is None:
        return "its nats were not measured"
    return f"it holds {result.summary.kept:.1%} of the prompt" if result.evicts else ""


def _from_half(budget: str) -> float:
    """Order budgets: shares by their distance from a half, then tokens in descending order."""
    return abs(float(budget) - HALF) if "." in budget else 1 + 1 / float(budget)


def _ahead(gain: Paired, unit: str, other: str) -> str:
    """Return how far a policy is ahead of another or behind it, with the interval."""
    word, low, high = ("behind", -gain.high, -gain.low) if gain.difference < 0 else ("ahead of", gain.low, gain.high)
    return f"{abs(gain.difference):.3f} {unit} {word} {other} [{low:.3f}, {high:.3f}]"
