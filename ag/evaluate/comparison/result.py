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
from ag.evaluate.comparison.folder import FinishedCell, Summary, tag_values
from ag.evaluate.comparison.statistics import Paired, compare, mean_and_error
from ag.evaluate.inside import KeptTokens
from ag.evaluate.tasks import Outcome

SPARE = 0.02  # largest difference of two kept shares that count as equal, as a share of the prompt
OF_SHARE = 0.2  # and relative to the smaller share, which is stricter for small shares
NOT_COMPARED = "Not compared with each other, because their kept shares differ:"


@dataclass(frozen=True)
class Result:
    """A finished cell with its policy, compared with the baseline."""

    summary: Summary
    outcomes: list[Outcome]
    views: list[KeptTokens]
    spec: PolicySpec
    paired: Paired | None = None  # scores minus the baseline's; None: not compared
    paired_nats: Paired | None = None  # nats minus the baseline's; None: not compared, or not measured

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
        """The kept share over tokens, and its mean over prompts. None: the cell failed."""
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
        """Return a tag (``nats``) by sample; an empty tag means the score."""
        return tag_values(self.outcomes, tag) if tag else {outcome.sample: outcome.score for outcome in self.outcomes}

    @cached_property
    def nats(self) -> tuple[float, float | None] | None:
        """Mean and standard error of the right answers' NLL per token. None: not measured."""
        values = self.values("nats")
        return mean_and_error(list(values.values())) if values else None

    def measure(self, tag: str) -> tuple[float, float, float] | None:
        """Return kept share, mean and standard error of the score (empty tag) or of ``nats``; None if not measured."""
        measured = self.nats if tag else (self.summary.mean, self.summary.error)
        if self.summary.kept is None or measured is None or measured[0] is None:
            return None
        return self.summary.kept, measured[0], measured[1] or 0.0


@dataclass(frozen=True)
class Comparison:
    """All results, in the order of their cells."""

    folder: Path
    baseline: str  # label of the policy that all policies are tested against
    results: list[Result]
    hidden: Sequence[str] = ()  # cells in the folder that only earlier commands list

    @classmethod
    def of(
        cls, config: CompareConfig, cells: Sequence[Cell], finished: Mapping[str, FinishedCell], folder: Path
    ) -> Comparison:
        """Select the results of the cells in a folder, and test each against the baseline."""
        results = []
        for cell in cells:
            summary, outcomes, views = finished[cell.key]
            # an earlier command may have given the policy another label
            summary = replace(summary, label=cell.label, policy=repr(cell.policy))
            results.append(Result(summary, outcomes, views, cell.policy.spec))
        shown_keys = {cell.key for cell in cells}
        hidden = [
            f"{other.summary.task}: {other.summary.name}" for key, other in finished.items() if key not in shown_keys
        ]
        kv_dtype = next(iter(config.held), "float")
        return cls.tested(
            folder, stored(config.called.get(config.baseline, config.baseline), kv_dtype), results, hidden
        )

    @classmethod
    def tested(cls, folder: Path, baseline: str, results: list[Result], hidden: Sequence[str] = ()) -> Comparison:
        """Compare each result with the baseline."""
        comparison = cls(folder, baseline, results, hidden)
        compared = []
        for result in results:
            if base := comparison.baseline_of(result):
                result = replace(
                    result, paired=paired_difference(result, base), paired_nats=paired_difference(result, base, "nats")
                )
            compared.append(result)
        return replace(comparison, results=compared)

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
        by_name: dict[str, list[Result]] = {}
        for result in self.results:
            by_name.setdefault(result.name, []).append(result)
        return by_name

    def of_task(self, task: str) -> list[Result]:
        """Return the results of a task."""
        return [result for result in self.results if result.summary.task == task]

    def at(self, task: str, budget: str) -> list[Result]:
        """Return the results of a task at a budget, and those without a budget."""
        return [result for result in self.of_task(task) if result.budget in ("", budget)]

    def baseline_of(self, result: Result) -> Result | None:
        """Return the baseline's result at this budget if the kept shares are equal."""
        other = self.baseline_at(result)
        return other if other is not None and comparable(result, other) else None

    def baseline_at(self, result: Result) -> Result | None:
        """Return the baseline's result at this budget, else its result without a budget; None if it has neither."""
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
        baselines = [result for result in self.results if result.summary.label == self.baseline]
        return {(result.summary.task, result.budget): result for result in reversed(baselines)}


def paired_difference(result: Result, other: Result, tag: str = "") -> Paired | None:
    """Compare the scores of two results, or a tag (``nats``); None if they share no sample."""
    scores, other_scores = result.values(tag), other.values(tag)
    common = [sample for sample in scores if sample in other_scores]
    if not common:
        return None
    blocks = None if tag else _block_differences(result, other)
    return compare([scores[sample] for sample in common], [other_scores[sample] for sample in common], blocks)


def by_position(
    result: Result, base: Result | None = None, part_kind: str = ""
) -> dict[int, tuple[float, float | None]]:
    """Return by block, ascending, the mean over texts of the nats, with its standard error.

    Args:
        result: a result whose outcomes have blocks.
        base: the result to subtract, on the texts and blocks that both have. None: nothing is subtracted.
        part_kind: kind of numbered parts (``turn``) to use instead of blocks.
    """

    def numbered(outcome: Outcome) -> Mapping[int, float]:
        return outcome.numbered(part_kind) if part_kind else outcome.blocks

    base_values = {} if base is None else {outcome.sample: numbered(outcome) for outcome in base.outcomes}
    differences: dict[int, list[float]] = {}
    for outcome in result.outcomes:
        values = numbered(outcome)
        subtracted = dict.fromkeys(values, 0.0) if base is None else base_values.get(outcome.sample, {})
        for start in values.keys() & subtracted.keys():
            differences.setdefault(start, []).append(values[start] - subtracted[start])
    return {start: mean_and_error(values) for start, values in sorted(differences.items())}


def part_names(results: Sequence[Result]) -> dict[str, list[str]]:
    """Return the names of the samples' parts by kind of part: numbers ascending, words in their order."""
    names_by_kind: dict[str, dict[str, None]] = {}
    for result in results:
        for outcome in result.outcomes:
            for part_kind, measured in outcome.parts.items():
                names_by_kind.setdefault(part_kind, {}).update(dict.fromkeys(measured["score"]))
    return {
        part_kind: sorted(names, key=lambda name: int(name) if name.isdigit() else 0)
        for part_kind, names in names_by_kind.items()
    }


def at_budget(results: Sequence[Result], budget: str) -> list[Result]:
    """Return the results of a task that evict and may be compared at a budget.

    The smallest kept share at this budget is the reference, since a policy may protect more than the budget. A policy
    without a budget (flags) takes part if its kept share is equal. An empty budget selects all policies without one.
    """
    evicting, lowest = _evicting(results, budget)
    return [result for result in evicting if not budget or (lowest is not None and same_kept_share(result, lowest))]


def uncompared_results(comparison: Comparison) -> list[str]:
    """Return sentences on the results that are not compared, because their kept shares differ."""
    pairs = []
    for task in comparison.tasks:
        results = comparison.of_task(task)
        for budget in comparison.budgets:
            evicting, lowest = _evicting(results, budget)
            pairs += [
                (task, result, lowest)
                for result in evicting
                if lowest is not None and not same_kept_share(result, lowest)
            ]
        for result in results:
            base = comparison.baseline_at(result)
            if result.paired is None and base is not None and not comparable(result, base):
                pairs.append((task, result, base))
    return list(dict.fromkeys(f"{task}: {_difference_text(result, other)}" for task, result, other in pairs))


def comparable(result: Result, other: Result) -> bool:
    """Whether two results of a task may be paired: their kept shares are equal, or one is the full cache."""
    return not (result.evicts and other.evicts) or same_kept_share(result, other)


def same_kept_share(result: Result, other: Result) -> bool:
    """Whether two results have equal kept shares, both over all tokens and as a mean over prompts.

    The two shares differ if prompts differ in length: a budget in tokens is a large share of a short prompt and a
    small share of a long prompt, while flags keep about equal shares of both. Memory is a mean over tokens, the score
    a mean over prompts. If the model writes the texts, their lengths differ between policies. Then equal numbers of
    cached tokens suffice.
    """
    if result.shares is None or other.shares is None:
        return False
    if all(shares_agree(*shares) for shares in zip(result.shares, other.shares, strict=True)):
        return True
    tokens, other_tokens = result.tokens, other.tokens
    mean_tokens = (tokens + other_tokens) / 2
    return tokens != other_tokens and shares_agree(
        result.shares[0] * tokens / mean_tokens, other.shares[0] * other_tokens / mean_tokens
    )


def shares_agree(share: float, other: float) -> bool:
    """Whether two kept shares count as equal: they differ by at most 2 % of the prompt and a fifth of the smaller."""
    return abs(share - other) <= min(SPARE, OF_SHARE * min(share, other)) + 1e-9  # 0.27 - 0.25 is a little over 0.02


def name_with_share(result: Result) -> str:
    """Return the name of a result in charts: policy, budget and kept share."""
    return result.name if result.shares is None else f"{result.name} ({percent(result.shares[0])})"


def kept_shares_text(results: Sequence[Result]) -> str:
    """Return the kept shares of a policy as text: for each budget the lowest and the highest over tasks."""
    shares: dict[str, list[float]] = {}
    for result in results:
        if result.shares is not None:
            shares.setdefault(result.budget, []).append(result.shares[0])
    bounds = sorted((min(values), max(values)) for values in shares.values())
    texts = [" to ".join(dict.fromkeys(map(_number, ends))) for ends in bounds]
    return f"{', '.join(dict.fromkeys(texts))} %" if texts else ""


def percent(share: float) -> str:
    """Return a share as text: ``25 %``, and with a decimal below ten."""
    return f"{_number(share)} %"


def _number(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f}"


def _evicting(results: Sequence[Result], budget: str) -> tuple[list[Result], Result | None]:
    """Return the results that evict, at a budget or without one, and the smallest kept share's result at the budget."""
    evicting = [
        result for result in results if result.shares is not None and result.evicts and result.budget in ("", budget)
    ]
    return evicting, min(
        (result for result in evicting if result.budget == budget), key=lambda result: result.shares or (), default=None
    )


def _difference_text(result: Result, other: Result) -> str:
    """Return a sentence on the different shares of two results."""
    assert result.shares is not None and other.shares is not None
    which = 0 if not shares_agree(result.shares[0], other.shares[0]) else 1
    of = ("", " of a prompt on average")[which]
    return f"{result.name} keeps {100 * result.shares[which]:.1f} %{of}, {other.name} {100 * other.shares[which]:.1f} %"


def _block_differences(result: Result, other: Result) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]] | None:
    """Return the differences of blocks and their tokens for each sample of both results; None without blocks."""
    other_outcomes = {outcome.sample: outcome for outcome in other.outcomes}
    blocks = []
    for outcome in result.outcomes:
        if outcome.sample in other_outcomes:
            nats_by_block, other_nats = outcome.blocks, other_outcomes[outcome.sample].blocks
            if not nats_by_block or nats_by_block.keys() != other_nats.keys():
                return None
            differences = np.array([nats - other_nats[start] for start, nats in nats_by_block.items()])
            blocks.append((differences, np.diff([*nats_by_block, outcome.tokens]).astype(np.float64)))
    return blocks
