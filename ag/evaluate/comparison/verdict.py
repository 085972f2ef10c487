"""The verdict: which policy is best at a share of the memory, by how much, and how far from the full cache."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ag.evaluate.comparison.folder import comparable_samples, tag_values
from ag.evaluate.comparison.rows import Comparison, Row, at_budget, percent, same_kept_share, stores_codes
from ag.evaluate.comparison.statistics import SIGNIFICANT, Paired, interval_text

HALF = 0.5
MAX_LETTERS = 120  # most characters of a failed cell's reason; the row has the complete reason
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
    best: Row | None = None  # the policy with the best mean
    rival: Row | None = None  # its best rival
    gain: Paired | None = None  # of ``best`` over ``rival``; above 0 means better
    memory: float = math.inf  # measured: bytes as a share of the full cache's, or the kept share without a full cache

    @property
    def certain(self) -> bool:
        """Whether the gain is more than chance."""
        return self.gain is not None and self.gain.certain

    def __str__(self) -> str:
        return ". ".join(self.sentences)


def find_verdicts(comparison: Comparison) -> list[Verdict]:
    """Return the verdict of each task and budget; of a task, the one measured nearest half the memory is first."""
    verdicts: list[Verdict] = []
    for task in comparison.tasks:
        if remark := comparison.uninformative(task):
            verdicts.append(Verdict(task, "", [f"{task}: no verdict, {remark}"]))
            continue
        budgets = [x for x in comparison.budgets(task) if any(row.evicts for row in comparison.at(task, x))]
        task_verdicts = [find_verdict(comparison, task, budget) for budget in budgets]
        verdicts += sorted(task_verdicts, key=lambda verdict: abs(verdict.memory - HALF))
    return verdicts


def headlines(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the first verdict of each task."""
    return list({verdict.task: verdict for verdict in reversed(verdicts)}.values())[::-1]


def find_verdict(comparison: Comparison, task: str, budget: str) -> Verdict:
    """Compare the best policy of a task at a budget with its best rival, or say why this is impossible.

    Only policies with equal kept shares are compared, see :func:`ag.evaluate.comparison.rows.at_budget`. Nats decide
    if they were measured, else the score.
    """
    rows = comparison.of_task(task)
    tag = "" if all(math.isnan(row.nats) for row in rows) else "nats"
    measured = [row for row in rows if row.n and not (tag and math.isnan(row.nats))]
    compared = at_budget(measured, budget).compared
    absent = [row for row in comparison.at(task, budget) if row not in compared]
    reasons = {row.label: reason for row in absent if (reason := _reason_left_out(row, tag))}
    left_out = [f"Left out: {', '.join(f'{label} ({reason})' for label, reason in reasons.items())}"] if reasons else []
    at = f" (budget {budget})" if budget else ""

    def without(reason: str) -> Verdict:
        return Verdict(task, budget, [f"{task}{at}: no verdict, {reason}", *left_out])

    if not compared:
        return without("no policy has a result at this budget")
    lower = bool(tag) or not compared[0].higher_is_better
    values = {row.key: tag_values(comparison.outcomes(row), tag) for row in compared}
    first = comparison.outcomes(compared[0])  # joined folders may have rows of more samples
    common = set(values[compared[0].key]).intersection(
        *({*comparable_samples(first, comparison.outcomes(row))} & values[row.key].keys() for row in compared)
    )

    def mean(row: Row) -> float:
        return fmean(values[row.key][sample] for sample in common or values[row.key])

    best, *other_policies = sorted(compared, key=mean, reverse=not lower)
    alike = [row for row in other_policies if same_kept_share(best, row)]
    full = min((row for row in measured if not row.evicts), key=stores_codes, default=None)
    rival = next((row for row in alike if not (best.gated and row.gated)), full)

    def gain_over(row: Row, other: Row | None) -> Paired | None:
        if other is None:
            return None
        return comparison.paired(other, row, tag) if lower else comparison.paired(row, other, tag)

    gain = gain_over(best, rival)
    if rival is None or gain is None:
        return without(f"no other policy can be compared with {compared[0].label}")
    unit = "nats" if tag or best.metric.startswith("nats") else f"in {best.metric}"
    gains = [(row.label, gain_over(best, row)) for row in alike]
    not_told_apart = [label for label, lead in gains if lead and (lead.low <= 0 or lead.p >= SIGNIFICANT)]
    memory = best.kept if math.isnan(best.memory) else best.memory
    share = f"With {percent(memory)} kept" if math.isnan(best.memory) else f"At {percent(memory)} of the memory"
    sentences = [f"{share}{at}, {task}: {_lead_text(best, rival, gain, unit, not_told_apart)}"]
    my_row = next((row for row in alike if row.label == comparison.mine and row is not rival), None)
    if my_row is not None and (lag := gain_over(my_row, best)):
        rank = f"number {other_policies.index(my_row) + 2} of {len(compared)}"
        sentences.append(f"{my_row.label}, {rank}, {_gain_text(lag, unit, best.label)} {_test_text(lag)}")
    losses = [(row, lost) for row in (best, rival) if row.evicts and (lost := gain_over(row, full))]
    if not losses:
        sentences.append("The full cache has no result to compare with")
    elif distance := _distance_text(comparison, losses, full, rival is full, tag, unit):
        sentences.append(distance)
    return Verdict(task, budget, [*sentences, *left_out], best, rival, gain, memory)


def _lead_text(best: Row, rival: Row, gain: Paired, unit: str, not_told_apart: Sequence[str]) -> str:
    """Return which policy is best and by how much, or that it is not better than its rival."""
    others = ", ".join(name for name in not_told_apart if gain.certain or name != rival.label)
    if gain.certain:
        lead = _gain_text(gain, unit, rival.label)
        return f"{best.label}, {lead} {_test_text(gain)}" + (others and f"; level with it: {others}")
    between = f"{gain.difference:+.3f} {unit}{interval_text(gain.low, gain.high, '.3f')} {_test_text(gain)}"
    return f"{best.label} cannot be told from {rival.label}, {between}" + (others and f", nor from {others}")


def _distance_text(
    comparison: Comparison, losses: Sequence[tuple[Row, Paired]], full: Row, is_told: bool, tag: str, unit: str
) -> str:
    """Return how far the best policy and its rival are from the full cache; empty without a fact.

    ``losses`` are the policies that evict, with their gains over the full cache. ``is_told`` says that the first
    sentence has the difference to it. If nats decide, the text also has both mean scores.
    """
    row, lost = losses[0]
    parts = []
    if not is_told:
        chance = "" if lost.certain else f", which may be chance (p = {lost.p:.3f})"
        parts.append(f"{row.label}, {_gain_text(lost, unit, full.label)}{chance}")
    if tag and (score := comparison.paired(row, full)) is not None:
        mean, full_mean = comparison.common_means(row, full, "score")
        interval = interval_text(score.low, score.high, ".3f")
        parts.append(f"{full.metric} {mean:.3f} against {full_mean:.3f}, {score.difference:+.3f}{interval}")
    if all(_is_far(comparison, *loss, full, unit) for loss in losses):
        parts.append(f"{'both are' if len(losses) > 1 else 'it is'} far from the full cache")
    return "; ".join(parts)


def _is_far(comparison: Comparison, row: Row, lost: Paired, full: Row, unit: str) -> bool:
    """Whether a policy loses half of the score above the floor, or ln 2 nats per token, by more than chance."""
    if full.higher_is_better:
        score, floor = comparison.paired(row, full), 0.0 if math.isnan(full.floor) else full.floor
        mean, full_mean = comparison.common_means(row, full, "score")
        if score is not None and score.certain and full_mean - mean > FAR_LOSS * (full_mean - floor):
            return True
    return unit == "nats" and -lost.difference > FAR_NATS and lost.certain


def _reason_left_out(row: Row, tag: str) -> str:
    """Return why a row is not compared; empty for the full cache, which every policy is compared with."""
    if not row.n:
        return f"no result: {textwrap.shorten(row.problem or 'no samples', MAX_LETTERS, placeholder=' ...')}"
    if tag and math.isnan(row.nats):
        return "its nats were not measured"
    return f"it keeps {percent(row.kept)} of the prompt" if row.evicts else ""


def _gain_text(gain: Paired, unit: str, other: str) -> str:
    """Return the lead or lag of a policy over another, with the interval."""
    word, low, high = ("behind", -gain.high, -gain.low) if gain.difference < 0 else ("ahead of", gain.low, gain.high)
    return f"{abs(gain.difference):.3f} {unit} {word} {other}{interval_text(low, high, '.3f')}"


def _test_text(gain: Paired) -> str:
    return f"(n = {gain.n}, p {'< 0.001' if gain.p < 0.001 else f'= {gain.p:.3f}'})"
