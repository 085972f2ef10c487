"""The results of a comparison, and which of them may be compared with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ag.commands.compare import CompareConfig, stored
from ag.config.spec import PolicySpec
from ag.evaluate.comparison.cells import Cell
from ag.evaluate.comparison.folder import Ended, Summary, tag_values
from ag.evaluate.comparison.statistics import Paired, compare, mean_and_error
from ag.evaluate.inside import View
from ag.evaluate.tasks import Outcome

SPARE = 0.02  # largest difference of two kept shares that count as equal, as a share of the prompt
OF_SHARE = 0.2  # and as a part of the smaller share, which is stricter where little is kept
APART = "Not compared with each other, because they hold different shares:"


@dataclass(frozen=True)
class Result:
    """A finished cell with its policy, compared with the baseline."""

    summary: Summary
    outcomes: list[Outcome]
    views: list[View]
    spec: PolicySpec
    paired: Paired | None = None  # scores minus the baseline's; None means that they are not compared
    paired_nats: Paired | None = None  # the same for nats; None also where nats were not measured

    @cached_property
    def budget(self) -> str:
        """The budget as text: "1" is a token, "1.0" the whole prompt; empty without a budget."""
        return "" if self.summary.budget is None else str(self.summary.budget)

    @property
    def name(self) -> str:
        """The policy and its budget."""
        return self.summary.name

    @cached_property
    def shares(self) -> tuple[float, float] | None:
        """The kept share of the tokens of all prompts, and the mean of the prompts' kept shares.

        None means that the cell failed.
        """
        if self.summary.kept is None or not self.outcomes:
            return None
        return self.summary.kept, sum(outcome.kept for outcome in self.outcomes) / len(self.outcomes)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(outcome.tokens for outcome in self.outcomes)

    @property
    def is_gated(self) -> bool:
        """Whether the policy reads gates."""
        return self.spec.reads_gates

    @property
    def evicts(self) -> bool:
        """Whether the policy may evict tokens."""
        return self.spec.evicts

    def values(self, tag: str = "") -> dict[str, float]:
        """Return a tag, such as ``nats``, by sample; an empty tag means the score."""
        return tag_values(self.outcomes, tag) if tag else {one.sample: one.score for one in self.outcomes}

    @cached_property
    def nats(self) -> tuple[float, float | None] | None:
        """Mean and standard error of the right answers' NLL per token; None means that it was not measured."""
        found = self.values("nats")
        return mean_and_error(list(found.values())) if found else None

    def measure(self, tag: str) -> tuple[float, float, float] | None:
        """Return kept share, mean and standard error of the score (empty tag) or of ``nats``; None if not measured."""
        found = self.nats if tag else (self.summary.mean, self.summary.error)
        if self.summary.kept is None or found is None or found[0] is None:
            return None
        return self.summary.kept, found[0], found[1] or 0.0


@dataclass(frozen=True)
class Comparison:
    """All results, in the order of their cells."""

    folder: Path
    baseline: str  # label of the policy that others are tested against
    results: list[Result]
    hidden: Sequence[str] = ()  # cells in the folder that earlier commands listed and this one does not

    @classmethod
    def of(cls, config: CompareConfig, cells: Sequence[Cell], found: Mapping[str, Ended], folder: Path) -> Comparison:
        """Select the results of the cells from all that are in a folder, and test each against the baseline."""
        results = []
        for cell in cells:
            summary, outcomes, views = found[cell.key]
            # an earlier command may have given the policy another label
            summary = replace(summary, label=cell.label, policy=repr(cell.policy))
            results.append(Result(summary, outcomes, views, cell.policy.spec))
        shown = {cell.key for cell in cells}
        hidden = [f"{one.summary.task}: {one.summary.name}" for key, one in found.items() if key not in shown]
        held = next(iter(config.held), "float")
        return cls.tested(folder, stored(config.called.get(config.baseline, config.baseline), held), results, hidden)

    @classmethod
    def tested(cls, folder: Path, baseline: str, results: list[Result], hidden: Sequence[str] = ()) -> Comparison:
        """Compare each result with the baseline."""
        made = cls(folder, baseline, results, hidden)
        found = []
        for result in results:
            if base := made.baseline_of(result):
                result = replace(result, paired=pair(result, base), paired_nats=pair(result, base, "nats"))
            found.append(result)
        return replace(made, results=found)

    @property
    def failed(self) -> list[Result]:
        """The cells without a result."""
        return [result for result in self.results if result.summary.problem is not None]

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks, in their order."""
        return list(dict.fromkeys(result.summary.task for result in self.results))

    @cached_property
    def labels(self) -> list[str]:
        """The labels of the policies, in their order."""
        return list(dict.fromkeys(result.summary.label for result in self.results))

    @cached_property
    def budgets(self) -> list[str]:
        """The budgets, in their order."""
        return list(dict.fromkeys(result.budget for result in self.results if result.budget))

    @cached_property
    def named(self) -> dict[str, list[Result]]:
        """The results by policy with budget, in their order."""
        found: dict[str, list[Result]] = {}
        for result in self.results:
            found.setdefault(result.name, []).append(result)
        return found

    def of_task(self, task: str) -> list[Result]:
        """Return the results of a task."""
        return [result for result in self.results if result.summary.task == task]

    def at(self, task: str, budget: str) -> list[Result]:
        """Return the results of a task at a budget, and those without a budget."""
        return [result for result in self.of_task(task) if result.budget in ("", budget)]

    def baseline_of(self, result: Result) -> Result | None:
        """Return the baseline's result at the same budget, if both hold equally much."""
        other = self.baseline_at(result)
        return other if other is not None and may_pair(result, other) else None

    def baseline_at(self, result: Result) -> Result | None:
        """Return the baseline's result at the same budget, else the one without a budget; None if there is none."""
        for budget in (result.budget, ""):
            other = self._baselines.get((result.summary.task, budget))
            if other is not None and other.outcomes and result.outcomes and other.summary.key != result.summary.key:
                return other
        return None

    def uninformative(self, task: str) -> str:
        """Return a remark if the model cannot do a task, as its full cache shows; else an empty text."""
        for summary in (result.summary for result in self.of_task(task) if not result.evicts):
            if summary.mean is not None and summary.floor is not None and summary.mean <= summary.floor:
                return f"not informative for this model: {summary.metric} {summary.mean:.4f} with the full cache"
        return ""

    @cached_property
    def _baselines(self) -> dict[tuple[str, str], Result]:
        """The baseline's results by task and budget, the first of each."""
        same = [result for result in self.results if result.summary.label == self.baseline]
        return {(result.summary.task, result.budget): result for result in reversed(same)}


def pair(result: Result, other: Result, tag: str = "") -> Paired | None:
    """Compare the scores of two results, or a tag such as ``nats``; None if they have no sample in common."""
    mine, theirs = result.values(tag), other.values(tag)
    both = [sample for sample in mine if sample in theirs]
    if not both:
        return None
    parts = None if tag else _blocks(result, other)
    return compare([mine[sample] for sample in both], [theirs[sample] for sample in both], parts)


def by_position(result: Result, base: Result | None = None, what: str = "") -> dict[int, tuple[float, float | None]]:
    """Return by block, ascending, the mean over texts of the nats, with its standard error.

    Args:
        result: of a task whose outcomes have blocks.
        base: the result that is subtracted, on the texts and blocks that both have; None means that nothing is.
        what: kind of the numbered parts, such as turns, that are taken instead of blocks.
    """

    def numbered(outcome: Outcome) -> Mapping[int, float]:
        return outcome.numbered(what) if what else outcome.blocks

    others = {} if base is None else {outcome.sample: numbered(outcome) for outcome in base.outcomes}
    found: dict[int, list[float]] = {}
    for outcome in result.outcomes:
        mine = numbered(outcome)
        theirs = dict.fromkeys(mine, 0.0) if base is None else others.get(outcome.sample, {})
        for start in mine.keys() & theirs.keys():
            found.setdefault(start, []).append(mine[start] - theirs[start])
    return {start: mean_and_error(values) for start, values in sorted(found.items())}


def part_names(results: Sequence[Result]) -> dict[str, list[str]]:
    """Return the names of the samples' parts by kind of part: numbers ascending, others in their order."""
    found: dict[str, dict[str, None]] = {}
    for result in results:
        for outcome in result.outcomes:
            for what, measured in outcome.parts.items():
                found.setdefault(what, {}).update(dict.fromkeys(measured["score"]))
    return {what: sorted(names, key=lambda name: int(name) if name.isdigit() else 0) for what, names in found.items()}


def at_budget(results: Sequence[Result], budget: str) -> list[Result]:
    """Return those results of a task that evict and may be compared at a budget.

    The result with this budget that holds least sets the share, since others may protect more than the budget. A policy
    without a budget (flags) takes part where it holds as much. An empty budget means all policies without one.
    """
    evicting, least = _evicting(results, budget)
    return [result for result in evicting if not budget or (least is not None and hold_alike(result, least))]


def apart(comparison: Comparison) -> list[str]:
    """Return sentences on the results that are not compared, because they hold another share."""
    found = []
    for task in comparison.tasks:
        results = comparison.of_task(task)
        for budget in comparison.budgets:
            evicting, least = _evicting(results, budget)
            found += [(task, one, least) for one in evicting if least is not None and not hold_alike(one, least)]
        for one in results:
            base = comparison.baseline_at(one)
            if one.paired is None and base is not None and not may_pair(one, base):
                found.append((task, one, base))
    return list(dict.fromkeys(f"{task}: {_differing(one, other)}" for task, one, other in found))


def may_pair(one: Result, other: Result) -> bool:
    """Whether two results of a task may be paired: they hold equally much, or one of them is the full cache."""
    return not (one.evicts and other.evicts) or hold_alike(one, other)


def hold_alike(one: Result, other: Result) -> bool:
    """Whether two results hold the same share of all tokens, and the same share of a prompt on average.

    The two shares differ where prompts differ in length: a budget in tokens is a large share of a short prompt and a
    small one of a long prompt, while flags hold about the same share of both. Memory is a mean over tokens, the score
    one over prompts. Where the model writes the texts, their lengths differ between policies; there results are also
    alike that hold as many tokens.
    """
    if one.shares is None or other.shares is None:
        return False
    if all(agree(*shares) for shares in zip(one.shares, other.shares, strict=True)):
        return True
    mine, theirs = one.tokens, other.tokens
    mean = (mine + theirs) / 2
    return mine != theirs and agree(one.shares[0] * mine / mean, other.shares[0] * theirs / mean)


def agree(one: float, other: float) -> bool:
    """Whether two kept shares count as equal: at most 2 % of the prompt and a fifth of the smaller one apart."""
    return abs(one - other) <= min(SPARE, OF_SHARE * min(one, other)) + 1e-9  # 0.27 - 0.25 is a little over 0.02


def shown(result: Result) -> str:
    """Return the name of a result in charts: policy, budget and kept share."""
    return result.name if result.shares is None else f"{result.name} ({percent(result.shares[0])})"


def held(results: Sequence[Result]) -> str:
    """Return the kept shares of a policy as text: for each budget, from the lowest to the highest of the tasks."""
    shares: dict[str, list[float]] = {}
    for result in results:
        if result.shares is not None:
            shares.setdefault(result.budget, []).append(result.shares[0])
    ends = sorted((min(found), max(found)) for found in shares.values())
    texts = [" to ".join(dict.fromkeys(map(_number, pair))) for pair in ends]
    return f"{', '.join(dict.fromkeys(texts))} %" if texts else ""


def percent(share: float) -> str:
    """Return a share as text: ``25 %``, and with a decimal below ten."""
    return f"{_number(share)} %"


def _number(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f}"


def _evicting(results: Sequence[Result], budget: str) -> tuple[list[Result], Result | None]:
    """Return the results that evict, at a budget or without one, and the one at the budget that holds least."""
    found = [one for one in results if one.shares is not None and one.evicts and one.budget in ("", budget)]
    return found, min((one for one in found if one.budget == budget), key=lambda one: one.shares or (), default=None)


def _differing(result: Result, other: Result) -> str:
    """Return a sentence on the different shares of two results."""
    assert result.shares is not None and other.shares is not None
    which = 0 if not agree(result.shares[0], other.shares[0]) else 1
    of = ("", " of a prompt on average")[which]
    return f"{result.name} holds {100 * result.shares[which]:.1f} %{of}, {other.name} {100 * other.shares[which]:.1f} %"


def _blocks(one: Result, other: Result) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]] | None:
    """Return for each sample that both have the differences of its blocks and their tokens; None without blocks."""
    theirs = {outcome.sample: outcome for outcome in other.outcomes}
    found = []
    for outcome in one.outcomes:
        if outcome.sample in theirs:
            mine, same = outcome.blocks, theirs[outcome.sample].blocks
            if not mine or mine.keys() != same.keys():
                return None
            differences = np.array([nats - same[start] for start, nats in mine.items()])
            found.append((differences, np.diff([*mine, outcome.tokens]).astype(np.float64)))
    return found
