"""What a comparison says first: who is best at a share of the memory, and whether that is more than chance."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from ag.evaluate.comparison.distance import Distance, ahead, better, certain, distance
from ag.evaluate.comparison.entries import Entry
from ag.evaluate.comparison.findings import SIGNIFICANT, Comparison
from ag.evaluate.comparison.shares import at_budget, hold_alike
from ag.evaluate.comparison.statistics import Paired

HALF = 0.5
LETTERS = 120  # of the reason why a policy has no result, which its row has in full


@dataclass(frozen=True)
class Finding:
    """What there is to say of a task at a budget.

    Attributes:
        task: its name.
        budget: as it is written; empty: policies without one.
        left_out: the policies that take no part, each with the reason.
    """

    task: str
    budget: str
    left_out: Sequence[str] = field(kw_only=True, default=())

    @property
    def certain(self) -> bool:
        """Whether a difference is more than chance."""
        return False

    @property
    def where(self) -> str:
        """The memory that is compared at."""
        if not self.budget:
            return "At the share that it keeps"
        if "." not in self.budget:
            return f"With {self.budget} tokens a head"
        share = float(self.budget)
        return "At half the memory" if share == HALF else f"At {100 * share:g} % of the memory"

    @property
    def sentences(self) -> list[str]:
        """What it says, without full stops."""
        return [f"Left out: {', '.join(self.left_out)}"] if self.left_out else []

    def __str__(self) -> str:
        return ". ".join(self.sentences)


@dataclass(frozen=True)
class NoVerdict(Finding):
    """Nothing can be said of a task, and why.

    Attributes:
        reason: why.
    """

    reason: str

    @property
    def sentences(self) -> list[str]:
        """See :class:`Finding`."""
        start = f"{self.where}, {self.task}" if self.budget else self.task
        return [f"{start}: no verdict, {self.reason}", *super().sentences]


@dataclass(frozen=True)
class Verdict(Finding):
    """The best policy at a budget on a task, and the best of its rivals.

    Where the best one has gates, rivals are the policies without: gates beside gates are one method. With a single
    policy the rival is what does not evict.

    Attributes:
        best: the policy with the best mean.
        rival: the best of the others.
        gain: how much better ``best`` is than ``rival``, above 0 where it is, with its interval and p.
        unit: of the gain.
        level: other policies at this budget that cannot be told from the best one.
        from_full: how far the best policy and its rival are from the full cache; empty without a result of it.
    """

    best: Entry
    rival: Entry
    gain: Paired
    unit: str
    level: Sequence[str]
    from_full: Sequence[Distance] = ()

    @property
    def certain(self) -> bool:
        """Whether the difference is more than chance: its interval and its test exclude 0."""
        return certain(self.gain)

    @property
    def sentences(self) -> list[str]:
        """See :class:`Finding`: who is best, how far that is from the full cache, who takes no part."""
        return [self._first(), *filter(None, [self._against_full()]), *super().sentences]

    def _first(self) -> str:
        gain, names = self.gain, [name for name in self.level if self.certain or name != self.rival.row.label]
        start, how = f"{self.where}, {self.task}: {self.best.row.label}", f"(n = {gain.n}, p {_p(gain.p)})"
        others, rival = ", ".join(names), self.rival.row.label
        if self.certain:
            return f"{start}, {ahead(gain, self.unit, rival)} {how}" + (others and f"; level with it: {others}")
        between = f"{gain.difference:+.3f} {self.unit} [{gain.low:.3f}, {gain.high:.3f}] {how}"
        return f"{start} cannot be told from {rival}, {between}" + (others and f", nor from {others}")

    def _against_full(self) -> str:
        if not self.from_full:
            return "The full cache has no result to compare with"
        mine, far = self.from_full[0], all(one.is_far for one in self.from_full)
        words = "both are far from the full cache" if len(self.from_full) > 1 else "it is far from the full cache"
        known = self.rival is mine.full  # the first sentence says it
        return "; ".join(filter(None, ["" if known else str(mine), mine.scores, words if far else ""]))


def verdicts(comparison: Comparison) -> list[Finding]:
    """Return what there is to say of each task and budget, the budget nearest half the memory first."""
    found: list[Finding] = []
    for task in comparison.tasks:
        if remark := comparison.uninformative(task):
            found.append(NoVerdict(task, "", remark))
            continue
        for budget in sorted(comparison.budgets, key=_from_half) or [""]:
            if any(entry.evicts for entry in _at(comparison, task, budget)):
                found.append(judge(comparison, task, budget) or _silence(comparison, task, budget))
    return found


def headlines(found: Sequence[Finding]) -> list[Finding]:
    """Return the first verdict of each task."""
    return list({one.task: one for one in reversed(found)}.values())[::-1]


def judge(comparison: Comparison, task: str, budget: str) -> Verdict | None:
    """Compare the best policy of a task at a budget with the best of its rivals; None where there are none.

    Those take part that hold equally much; see :func:`ag.evaluate.comparison.shares.at_budget`.
    """
    entries = [entry for entry in comparison.of_task(task) if entry.outcomes]
    nats = any(entry.nats is not None for entry in entries)
    entries = [entry for entry in entries if not nats or entry.nats is not None]
    lower = nats or not all(entry.row.higher_is_better for entry in entries)
    ranked = sorted(_compared(comparison, task, budget), key=lambda one: _mean(one, nats))
    if not lower:
        ranked.reverse()
    if not ranked:
        return None
    best = ranked[0]
    alike = [one for one in ranked[1:] if hold_alike(best, one)]
    full = next((one for one in entries if not one.evicts), None)
    rival = next((one for one in alike if not (best.is_gated and one.is_gated)), full)
    gain = None if rival is None else better(best, rival, nats, lower)
    if rival is None or gain is None:
        return None
    metric = best.row.metric
    unit = "nats" if nats or metric.startswith("nats") else f"in {metric}"
    level = [
        one.row.label
        for one in alike
        if (other := better(best, one, nats, lower)) is not None and (other.low <= 0 or other.p >= SIGNIFICANT)
    ]
    from_full = [distance(one, full, nats, lower, unit) for one in (best, rival)]
    return Verdict(
        task,
        budget,
        best,
        rival,
        gain,
        unit,
        level,
        [one for one in from_full if one is not None],
        left_out=left_out(comparison, task, budget),
    )


def left_out(comparison: Comparison, task: str, budget: str) -> list[str]:
    """Return the policies that take no part in the verdict of a task at a budget, each with the reason."""
    entries, compared = _at(comparison, task, budget), _compared(comparison, task, budget)
    nats = any(entry.nats is not None for entry in entries)
    reasons = ((one.row.label, _reason(one, nats)) for one in entries if not any(one is other for other in compared))
    return [f"{label} ({reason})" for label, reason in reasons if reason]


def _reason(entry: Entry, nats: bool) -> str:
    """Say why an entry is not compared; empty for the full cache, which every other one is held against."""
    if not entry.outcomes:
        return f"no result: {textwrap.shorten(entry.row.problem or 'no samples', LETTERS, placeholder=' ...')}"
    if nats and entry.nats is None:
        return "its nats were not measured"
    return f"it holds {entry.row.kept:.1%} of the prompt" if entry.evicts else ""


def _silence(comparison: Comparison, task: str, budget: str) -> NoVerdict:
    """Say why there is nothing to compare."""
    alone = [one.row.label for one in _compared(comparison, task, budget)]
    reason = f"there is nothing to compare {alone[0]} with" if alone else "no policy has a result at this budget"
    return NoVerdict(task, budget, reason, left_out=left_out(comparison, task, budget))


def _compared(comparison: Comparison, task: str, budget: str) -> list[Entry]:
    """Return the entries that are compared at a budget: with a result of the kind that decides, and holding alike."""
    entries = [entry for entry in comparison.of_task(task) if entry.outcomes]
    nats = any(entry.nats is not None for entry in entries)
    return at_budget([entry for entry in entries if not nats or entry.nats is not None], budget)


def _at(comparison: Comparison, task: str, budget: str) -> list[Entry]:
    """Return the entries of a task that were run at a budget, and those without one."""
    return [entry for entry in comparison.of_task(task) if entry.budget in ("", budget)]


def _mean(entry: Entry, nats: bool) -> float:
    measured = entry.measure(nats)
    assert measured is not None  # entries with outcomes have one
    return measured[1]


def _from_half(budget: str) -> float:
    """Order budgets: shares by their distance from a half, then tokens from the most on."""
    return abs(float(budget) - HALF) if "." in budget else 1 + 1 / float(budget)


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"
