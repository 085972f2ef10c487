"""What a comparison says first: who is best at a share of the memory, and whether that is more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ag.evaluate.comparison.findings import SIGNIFICANT, Comparison, Entry, pair
from ag.evaluate.comparison.statistics import Paired

SPARE = 0.02  # of a prompt, that a policy may hold above a budget and still be compared at it
HALF = 0.5


@dataclass(frozen=True)
class Verdict:
    """The best policy at a budget on a task, and the best of its rivals.

    Where the best one has gates, rivals are the policies without: gates beside gates are one method. With a single
    policy the rival is what does not evict.

    Attributes:
        task: its name.
        budget: as it is written; empty: policies without one.
        best: the policy with the best mean.
        rival: the best of the others.
        gain: how much better ``best`` is than ``rival``, above 0 where it is, with its interval and p.
        unit: of the gain.
        level: other policies at this budget that cannot be told from the best one.
    """

    task: str
    budget: str
    best: Entry
    rival: Entry
    gain: Paired
    unit: str
    level: Sequence[str]

    @property
    def certain(self) -> bool:
        """Whether the difference is more than chance: its interval and its test exclude 0."""
        return (self.gain.low > 0 or self.gain.high < 0) and self.gain.p < SIGNIFICANT

    @property
    def where(self) -> str:
        """The memory that is compared at."""
        if not self.budget:
            return "At the share that it keeps"
        if "." not in self.budget:
            return f"With {self.budget} tokens a head"
        share = float(self.budget)
        return "At half the memory" if share == HALF else f"At {100 * share:g} % of the memory"

    def __str__(self) -> str:
        gain = self.gain
        interval = f"[{gain.low:.3f}, {gain.high:.3f}]"
        start, how = f"{self.where}, {self.task}", f"(n = {gain.n}, p {_p(gain.p)})"
        if self.certain:
            word = "ahead of" if gain.difference > 0 else "behind"
            if gain.difference < 0:
                interval = f"[{-gain.high:.3f}, {-gain.low:.3f}]"
            first = (
                f"{start}: {self.best.row.label}, {abs(gain.difference):.3f} {self.unit} {word} {self.rival.row.label}"
            )
            return f"{first} {interval} {how}" + (f"; level with it: {', '.join(self.level)}" if self.level else "")
        between = f"{gain.difference:+.3f} {self.unit} {interval} {how}"
        others = [name for name in self.level if name != self.rival.row.label]
        more = f", nor from {', '.join(others)}" if others else ""
        return f"{start}: {self.best.row.label} cannot be told from {self.rival.row.label}, {between}{more}"


def verdicts(comparison: Comparison) -> list[Verdict]:
    """Return a verdict for each task that says something and each budget, the one nearest half the memory first."""
    found = []
    for task in comparison.tasks:
        if comparison.uninformative(task):
            continue
        for budget in sorted(comparison.budgets, key=_from_half) or [""]:
            verdict = judge(comparison, task, budget)
            if verdict is not None:
                found.append(verdict)
    return found


def headlines(found: Sequence[Verdict]) -> list[Verdict]:
    """Return the first verdict of each task."""
    return list({one.task: one for one in reversed(found)}.values())[::-1]


def judge(comparison: Comparison, task: str, budget: str) -> Verdict | None:
    """Compare the best policy of a task at a budget with the best of its rivals; None where there are none.

    Policies without a budget take part where they hold no more than it.
    """
    entries = [entry for entry in comparison.of_task(task) if entry.outcomes]
    nats = any(entry.nats is not None for entry in entries)
    entries = [entry for entry in entries if not nats or entry.nats is not None]
    lower = nats or not all(entry.row.higher_is_better for entry in entries)
    ranked = sorted((one for one in entries if one.evicts and _fits(one, budget)), key=lambda one: _mean(one, nats))
    if not lower:
        ranked.reverse()
    if not ranked:
        return None
    best = ranked[0]
    others = [one for one in ranked[1:] if not (best.is_gated and one.is_gated)]
    rivals = others or [one for one in entries if not one.evicts]
    if not rivals:
        return None
    gains = [_gain(best, one, nats, lower) for one in rivals]
    if gains[0] is None:
        return None
    metric = best.row.metric
    unit = "nats" if nats or metric.startswith("nats") else f"in {metric}"
    level = [
        one.row.label
        for one in ranked[1:]
        if (gain := _gain(best, one, nats, lower)) is not None and (gain.low <= 0 or gain.p >= SIGNIFICANT)
    ]
    return Verdict(task, budget, best, rivals[0], gains[0], unit, level)


def _gain(best: Entry, other: Entry, nats: bool, lower: bool) -> Paired | None:
    return pair(other, best, nats) if lower else pair(best, other, nats)


def _mean(entry: Entry, nats: bool) -> float:
    measured = entry.measure(nats)
    assert measured is not None  # entries with outcomes have one
    return measured[1]


def _fits(entry: Entry, budget: str) -> bool:
    if entry.budget or not budget:
        return entry.budget == budget
    return "." in budget and entry.row.kept is not None and entry.row.kept <= float(budget) + SPARE


def _from_half(budget: str) -> float:
    """Order budgets: shares by their distance from a half, then tokens from the most on."""
    return abs(float(budget) - HALF) if "." in budget else 1 + 1 / float(budget)


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"
