"""The verdict: which policy is best at a share of the memory, by how much, and how far from the full cache."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ag.evaluate.comparison.result import Comparison, Result, at_budget, paired_difference, same_kept_share
from ag.evaluate.comparison.statistics import SIGNIFICANT, Paired

HALF = 0.5
MAX_LETTERS = 120  # most characters of a failed cell's reason; the summary has the complete reason
FAR_LOSS = 0.5  # a policy that loses a larger part of the score above the floor is far from the full cache
FAR_NATS = math.log(2)  # as is a policy that loses more nats per token: a token of the right answer is half as likely


@dataclass(frozen=True)
class Verdict:
    """The verdict of a task at a budget; ``best`` is None if no policies can be compared.

    If the best policy has gates, its rivals are the policies without gates: all gates are one method. The rival of a
    single policy is the full cache.
    """

    task: str
    budget: str  # as text; empty for policies without a budget
    sentences: list[str]  # without full stops
    best: Result | None = None  # the policy with the best mean
    rival: Result | None = None  # its best rival
    gain: Paired | None = None  # of ``best`` over ``rival``; above 0 means better

    @property
    def certain(self) -> bool:
        """Whether the gain is more than chance."""
        return self.gain is not None and self.gain.certain

    def __str__(self) -> str:
        return ". ".join(self.sentences)


def find_verdicts(comparison: Comparison) -> list[Verdict]:
    """Return the verdict of each task and budget, the budget nearest half the memory first."""
    verdicts: list[Verdict] = []
    for task in comparison.tasks:
        if remark := comparison.uninformative(task):
            verdicts.append(Verdict(task, "", [f"{task}: no verdict, {remark}"]))
            continue
        for budget in sorted(comparison.budgets, key=_distance_to_half) or [""]:
            if any(result.evicts for result in comparison.at(task, budget)):
                verdicts.append(find_verdict(comparison, task, budget))
    return verdicts


def headlines(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the first verdict of each task."""
    return list({verdict.task: verdict for verdict in reversed(verdicts)}.values())[::-1]


def find_verdict(comparison: Comparison, task: str, budget: str) -> Verdict:
    """Compare the best policy of a task at a budget with its best rival, or say why this is impossible.

    Only policies with equal kept shares are compared, see :func:`ag.evaluate.comparison.result.at_budget`. Nats decide
    if they were measured, else the score.
    """
    results = comparison.of_task(task)
    tag = "nats" if any(result.nats is not None for result in results) else ""
    measured = [result for result in results if result.outcomes and (not tag or result.nats is not None)]
    compared = at_budget(measured, budget)
    absent = [result for result in comparison.at(task, budget) if not any(result is other for other in compared)]
    reasons = {result.summary.label: reason for result in absent if (reason := _reason_left_out(result, tag))}
    left_out = [f"Left out: {', '.join(f'{label} ({reason})' for label, reason in reasons.items())}"] if reasons else []
    memory = f"{_memory_text(budget)}, {task}"

    def without(reason: str) -> Verdict:
        return Verdict(task, budget, [f"{memory if budget else task}: no verdict, {reason}", *left_out])

    if not compared:
        return without("no policy has a result at this budget")
    lower = bool(tag) or not compared[0].summary.higher_is_better
    best, *runners_up = sorted(compared, key=lambda result: (result.measure(tag) or (0, 0))[1], reverse=not lower)
    alike = [result for result in runners_up if same_kept_share(best, result)]
    full = next((result for result in measured if not result.evicts), None)
    rival = next((result for result in alike if not (best.is_gated and result.is_gated)), full)
    gain = None if rival is None else _gain_over(best, rival, tag)
    if rival is None or gain is None:
        return without(f"no other policy can be compared with {compared[0].summary.label}")
    unit = "nats" if tag or best.summary.metric.startswith("nats") else f"in {best.summary.metric}"
    gains = [(result.summary.label, _gain_over(best, result, tag)) for result in alike]
    level = [label for label, other in gains if other and (other.low <= 0 or other.p >= SIGNIFICANT)]
    sentences = [
        f"{memory}: {_lead_text(best, rival, gain, unit, level)}",
        *_distance_text(best, rival, full, tag, unit),
    ]
    return Verdict(task, budget, [*sentences, *left_out], best, rival, gain)


def _gain_over(result: Result, other: Result, tag: str) -> Paired | None:
    """Return the gain of a result over another, above 0 if it is better. None: they share no sample."""
    lower = tag or not result.summary.higher_is_better
    return paired_difference(other, result, tag) if lower else paired_difference(result, other)


def _memory_text(budget: str) -> str:
    """Return the budget in words."""
    if not budget:
        return "At the share that it keeps"
    if "." not in budget:
        return f"With {budget} tokens a head"
    return "At half the memory" if float(budget) == HALF else f"At {100 * float(budget):g} % of the memory"


def _lead_text(best: Result, rival: Result, gain: Paired, unit: str, level: Sequence[str]) -> str:
    """Return which policy is best and by how much, or that it is not better than its rival."""
    level_names = ", ".join(name for name in level if gain.certain or name != rival.summary.label)
    test_text = f"(n = {gain.n}, p {'< 0.001' if gain.p < 0.001 else f'= {gain.p:.3f}'})"
    if gain.certain:
        lead = _gain_text(gain, unit, rival.summary.label)
        return f"{best.summary.label}, {lead} {test_text}" + (level_names and f"; level with it: {level_names}")
    between = f"{gain.difference:+.3f} {unit} [{gain.low:.3f}, {gain.high:.3f}] {test_text}"
    text = f"{best.summary.label} cannot be told from {rival.summary.label}, {between}"
    return text + (level_names and f", nor from {level_names}")


def _distance_text(best: Result, rival: Result, full: Result | None, tag: str, unit: str) -> list[str]:
    """Return a sentence on the distance of the best policy and its rival to the full cache; empty without a fact.

    If nats decide, it also has both mean scores and their difference.
    """
    differences = [
        (result, full, _gain_over(result, full, tag)) for result in (best, rival) if full is not None and result.evicts
    ]
    losses = [(result, other, lost) for result, other, lost in differences if lost is not None]
    if not losses:
        return ["The full cache has no result to compare with"]
    result, other, lost = losses[0]
    parts = []
    if rival is not other:  # else the first sentence has this difference
        chance = "" if lost.certain else f", which may be chance (p = {lost.p:.3f})"
        parts.append(f"{result.summary.label}, {_gain_text(lost, unit, other.summary.label)}{chance}")
    if tag and (score := paired_difference(result, other)) is not None:
        means = f"{other.summary.metric} {result.summary.mean:.3f} against {other.summary.mean:.3f}"
        parts.append(f"{means}, {score.difference:+.3f} [{score.low:.3f}, {score.high:.3f}]")
    if all(_is_far(*loss, tag, unit) for loss in losses):
        parts.append(f"{'both are' if len(losses) > 1 else 'it is'} far from the full cache")
    return ["; ".join(parts)] if parts else []


def _is_far(result: Result, full: Result, lost: Paired, tag: str, unit: str) -> bool:
    """Whether a policy loses half of the score above the floor, or ln 2 nats per token, by more than chance."""
    summary, full_summary = result.summary, full.summary
    if full_summary.higher_is_better and summary.mean is not None and full_summary.mean is not None:
        score = paired_difference(result, full) if tag else lost
        if (
            score
            and score.certain
            and full_summary.mean - summary.mean > FAR_LOSS * (full_summary.mean - (full_summary.floor or 0.0))
        ):
            return True
    return unit == "nats" and -lost.difference > FAR_NATS and lost.certain


def _reason_left_out(result: Result, tag: str) -> str:
    """Return why a result is not compared; empty for the full cache, which every policy is compared with."""
    if not result.outcomes:
        return f"no result: {textwrap.shorten(result.summary.problem or 'no samples', MAX_LETTERS, placeholder=' ...')}"
    if tag and result.nats is None:
        return "its nats were not measured"
    return f"it keeps {result.summary.kept:.1%} of the prompt" if result.evicts else ""


def _distance_to_half(budget: str) -> float:
    """Order budgets: shares by their distance from a half, then tokens in descending order."""
    return abs(float(budget) - HALF) if "." in budget else 1 + 1 / float(budget)


def _gain_text(gain: Paired, unit: str, other: str) -> str:
    """Return the lead or lag of a policy over another, with the interval."""
    word, low, high = ("behind", -gain.high, -gain.low) if gain.difference < 0 else ("ahead of", gain.low, gain.high)
    return f"{abs(gain.difference):.3f} {unit} {word} {other} [{low:.3f}, {high:.3f}]"
