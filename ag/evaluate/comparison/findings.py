"""What a comparison found: every cell with its samples, differences and their certainty."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ag.commands.compare import CompareConfig
from ag.evaluate.comparison.cells import Cell
from ag.evaluate.comparison.folder import Ended, Summary
from ag.evaluate.comparison.result import Result, pair
from ag.evaluate.comparison.shares import apart, at_budget, differing, held, may_pair, percent
from ag.evaluate.comparison.statistics import SIGNIFICANT, sign_flips
from ag.evaluate.tasks import unit


@dataclass(frozen=True)
class Wins:
    """Every pair of P policies that hold equally much at a budget, and the full cache beside each of them."""

    names: list[str]  # with the shares that they hold
    share: NDArray[np.float64]  # `[P, P]` of the tasks in which the row's mean is better, a tie being half
    certain: NDArray[np.int64]  # `[P, P]` how many of these tasks show it with p below 0.05
    tasks: NDArray[np.int64]  # `[P, P]` in how many tasks both may be paired


@dataclass(frozen=True)
class Comparison:
    """All cells, in their order."""

    folder: Path
    baseline: str  # the policy that others are tested against
    results: list[Result]
    hidden: Sequence[str] = ()  # names of the rows in the folder that earlier commands asked for and this one does not

    @classmethod
    def of(cls, config: CompareConfig, cells: Sequence[Cell], found: Mapping[str, Ended], folder: Path) -> Comparison:
        """Gather what belongs to the cells from all that is in a folder, and test each against the baseline."""
        results = []
        for cell in cells:
            # an earlier run may have called it otherwise
            summary, outcomes, views = found[cell.key]
            summary = replace(summary, label=cell.label, policy=repr(cell.policy))
            results.append(Result(summary, outcomes, views, cell.policy.spec))
        baseline = config.called.get(config.baseline, config.baseline)
        shown = {cell.key for cell in cells}
        hidden = [f"{one.summary.task}: {one.summary.name}" for key, one in found.items() if key not in shown]
        return cls.tested(folder, baseline, results, hidden)

    @classmethod
    def tested(cls, folder: Path, baseline: str, results: list[Result], hidden: Sequence[str] = ()) -> Comparison:
        """Compare each result with the baseline."""
        made = cls(folder, baseline, results, hidden)
        found = []
        for result in results:
            if base := made.baseline_of(result):
                result = replace(result, paired=pair(result, base), paired_nats=pair(result, base, nats=True))
            found.append(result)
        return replace(made, results=found)

    @property
    def failed(self) -> list[Result]:
        """The cells without a result."""
        return [result for result in self.results if result.summary.problem is not None]

    @property
    def tasks(self) -> list[str]:
        """The tasks, in their order."""
        return list(self._by_task)

    @cached_property
    def labels(self) -> list[str]:
        """The policies as they were listed, in their order."""
        return list(dict.fromkeys(result.summary.label for result in self.results))

    @cached_property
    def named(self) -> dict[str, list[Result]]:
        """The results of each policy and budget, in their order."""
        return _grouped(self.results, lambda result: result.name)

    @property
    def names(self) -> list[str]:
        """The policies with their budgets, in their order."""
        return list(self.named)

    @property
    def meanings(self) -> dict[str, str]:
        """What the names stand for that do not say it themselves: labels, and shortened paths."""
        return {
            result.name: result.summary.policy for result in self.results if result.summary.label != str(result.spec)
        }

    @cached_property
    def budgets(self) -> list[str]:
        """The budgets, in their order."""
        return list(dict.fromkeys(result.budget for result in self.results if result.budget))

    def shown(self, label: str) -> str:
        """Return what legends call a policy: its label and the shares that it holds."""
        shares = held([result for result in self.results if result.summary.label == label])
        return f"{label} ({shares})" if shares else label

    def of_task(self, task: str) -> list[Result]:
        """Return the results of a task."""
        return self._by_task.get(task, [])

    @cached_property
    def _by_task(self) -> dict[str, list[Result]]:
        return _grouped(self.results, lambda result: result.summary.task)

    @cached_property
    def _baselines(self) -> dict[tuple[str, str], Result]:
        """The baseline's results by task and budget, the first of each."""
        same = [result for result in self.results if result.summary.label == self.baseline]
        return {(result.summary.task, result.budget): result for result in reversed(same)}

    def baseline_of(self, result: Result) -> Result | None:
        """Return what a result is tested against: the baseline at its budget, where both hold equally much."""
        other = self._baseline_at(result)
        return other if other is not None and may_pair(result, other) else None

    def _baseline_at(self, result: Result) -> Result | None:
        """Return the baseline at a result's budget, else the one without a budget; None without a result of both."""
        for budget in (result.budget, ""):
            other = self._baselines.get((result.summary.task, budget))
            if other is not None and other.outcomes and result.outcomes and other.summary.key != result.summary.key:
                return other
        return None

    def counted(self, task: str) -> str:
        """Say how many samples of a task were run, in its unit, how many were left out and why, and when was asked.

        Samples that a policy cannot change are counted too: see :meth:`ag.evaluate.comparison.cells.Cell.untouched`.
        """
        summaries = [result.summary for result in self.of_task(task)]
        summary = max(summaries, key=lambda summary: summary.n)
        said = [f"{summary.n} {unit(task)}, left out: {summary.left_out}"]
        if summary.question is not None:
            said.append(f"question {summary.question} eviction")
        if untouched := max((summary.untouched or 0 for summary in summaries if summary.n), default=0):
            said.append(f"{untouched} with answers of one token alone, which eviction after the prompt cannot change")
        return "; ".join(said)

    def uninformative(self, task: str) -> str:
        """Say that the model cannot do a task, as its full cache shows; empty where it can, or where nobody knows."""
        for summary in (result.summary for result in self.of_task(task) if not result.evicts):
            if summary.mean is not None and summary.floor is not None and summary.mean <= summary.floor:
                return f"not informative for this model: {summary.metric} {summary.mean:.4f} with the full cache"
        return ""

    @cached_property
    def averaged(self) -> list[str]:
        """The metrics that several tasks share and whose mean over these tasks says something."""
        metrics = [self.of_task(task)[0].summary for task in self.tasks]
        names = [summary.metric for summary in metrics if summary.higher_is_better]
        return [name for name in dict.fromkeys(names) if names.count(name) > 1]

    def leaders(self) -> list[tuple[str, list[Summary | None], list[float | None]]]:
        """Return for each policy and budget its rows by task, and its means over the tasks of each averaged metric."""
        lines = []
        for name, results in self.named.items():
            found = {result.summary.task: result.summary for result in results}
            averages = []
            for metric in self.averaged:
                means = [summary.mean for summary in found.values() if summary.metric == metric]
                scores = [mean for mean in means if mean is not None]
                averages.append(sum(scores) / len(scores) if len(scores) == len(means) else None)
            lines.append((name, [found.get(task) for task in self.tasks], averages))
        return lines

    def wins(self, budget: str) -> Wins:
        """Compare every pair of policies that hold equally much at a budget, and the full cache with each of them."""
        part = {id(result) for task in self.tasks for result in at_budget(self.of_task(task), budget)}
        results = [one for one in self.results if one.outcomes and (id(one) in part or not one.evicts)]
        names = list(dict.fromkeys(result.name for result in results))
        better, certain, tasks = (np.zeros((len(names), len(names))) for _ in range(3))
        for task in self.tasks:
            mine = [result for result in results if result.summary.task == task]
            if not mine:
                continue
            at = np.ix_(*[[names.index(result.name) for result in mine]] * 2)
            gain, p = _gains(mine)
            paired = np.array([[may_pair(one, other) for other in mine] for one in mine])
            better[at] += paired * np.where(gain == 0, 0.5, gain > 0)
            certain[at] += paired & (gain > 0) & (p < SIGNIFICANT)
            tasks[at] += paired
        share = np.divide(better, tasks, out=np.full_like(better, np.nan), where=tasks > 0)
        shown = [f"{name} ({held([result for result in results if result.name == name])})" for name in names]
        return Wins(shown, share, certain.astype(np.int64), tasks.astype(np.int64))

    def apart(self) -> list[str]:
        """Say which results are not compared, because they hold another share than those beside them."""
        found = []
        for task in self.tasks:
            results = self.of_task(task)
            found += [f"{task}: {said}" for budget in self.budgets for said in apart(results, budget)]
            bases = [(one, self._baseline_at(one)) for one in results if one.paired is None]
            found += [f"{task}: {differing(one, base)}" for one, base in bases if base and not may_pair(one, base)]
        return list(dict.fromkeys(found))

    def layers(self) -> tuple[list[str], NDArray[np.float64]]:
        """Return the share that each layer kept of the viewed prompts, ``[P, L]``, of the policies that evict."""
        names, shares = [], []
        for name, results in self.named.items():
            views = [view for one in results if one.evicts for view in one.views]
            kept = sum(view.kept.sum((1, 2)) for view in views)
            if views:
                shares.append(kept / sum(view.kept[0].size for view in views))
                names.append(f"{name} ({percent(float(shares[-1].mean()))})")
        return names, np.array(shares)


def _grouped(results: Sequence[Result], by: Callable[[Result], str]) -> dict[str, list[Result]]:
    """Return the results by a name, in their order."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(by(result), []).append(result)
    return found


def _gains(results: Sequence[Result]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how much better each of P results of a task is than each other, and how likely by chance, ``[P, P]``."""
    scored = [result.scores for result in results]
    shared = [sample for sample in scored[0] if all(sample in scores for scores in scored)]
    scores = np.array([[one[sample] for sample in shared] for one in scored])
    scores = scores if results[0].summary.higher_is_better else -scores
    differences = scores[:, None] - scores[None]
    p = sign_flips(differences.reshape(-1, len(shared))).reshape(len(results), -1)
    return differences.mean(-1), p
