"""What a comparison found: every cell with its samples, differences and their certainty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ag.commands.compare import CompareConfig
from ag.engine.spec import PolicySpec
from ag.evaluate.comparison.cells import Cell
from ag.evaluate.comparison.results import Results, Row, tag_values
from ag.evaluate.comparison.shares import apart, at_budget, differing, held, may_pair, percent
from ag.evaluate.comparison.statistics import Paired, compare, mean_and_error, sign_flips
from ag.evaluate.comparison.views import View
from ag.evaluate.tasks import Outcome, unit

SIGNIFICANT = 0.05
NATS = ("nats", "nats difference", "hits")  # of tasks with a right answer
OVER = "over budget"
OVER_NOTE = "samples in which more is protected (sinks, recent, window) than the budget allows, and stays"
COLUMNS = ("policy", "budget", "kept", OVER, "score", "difference", "p", *NATS, "n", "left out", "prefill", "KV MB")


@dataclass(frozen=True)
class Entry:
    """A cell with all that came out of it.

    Attributes:
        row: its row.
        outcomes: of its samples.
        views: what it kept of a few prompts.
        spec: what its policy is made of.
        paired: against the baseline on the same task; None for the baseline itself and where either has no result.
        paired_nats: the same of the right answers' negative log-likelihoods; None where these were not measured.
    """

    row: Row
    outcomes: list[Outcome]
    views: list[View]
    spec: PolicySpec
    paired: Paired | None = None
    paired_nats: Paired | None = None

    @property
    def budget(self) -> str:
        """The budget as it is written: 1 is a token, 1.0 the whole prompt; empty without one."""
        return "" if self.row.budget is None else str(self.row.budget)

    @property
    def name(self) -> str:
        """The policy and its budget."""
        return self.row.name

    @property
    def shown(self) -> str:
        """What pictures call it: its name and the share that it holds."""
        return self.name if self.shares is None else f"{self.name} ({percent(self.shares[0])})"

    @property
    def shares(self) -> tuple[float, float] | None:
        """The shares that it holds: of the tokens of all prompts, and of a prompt on average; None without a result."""
        if self.row.kept is None or not self.outcomes:
            return None
        return self.row.kept, sum(outcome.kept for outcome in self.outcomes) / len(self.outcomes)

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(outcome.tokens for outcome in self.outcomes)

    @property
    def is_gated(self) -> bool:
        """Whether gates take part, whatever the row is called."""
        return self.spec.reads_gates

    @property
    def evicts(self) -> bool:
        """Whether anything may go."""
        return self.spec.evicts

    @property
    def scores(self) -> dict[str, float]:
        """The score of each sample."""
        return {outcome.sample: outcome.score for outcome in self.outcomes}

    @property
    def nats(self) -> tuple[float, float | None] | None:
        """Mean and standard error of the right answers' negative log-likelihood per token, where it was measured."""
        found = tag_values(self.outcomes, "nats")
        return mean_and_error(list(found.values())) if found else None

    def measure(self, nats: bool) -> tuple[float, float, float] | None:
        """Return kept share, mean and standard error of the score or of the nats; None where they are not known."""
        found = self.nats if nats else (self.row.mean, self.row.error)
        if self.row.kept is None or found is None or found[0] is None:
            return None
        return self.row.kept, found[0], found[1] or 0.0

    def cells(self) -> dict[str, str]:
        """Return its line in a table, as texts by column; see COLUMNS."""
        row, paired = self.row, self.paired
        texts = dict.fromkeys(COLUMNS, "") | {"policy": row.label, "budget": self.budget, "prefill": row.prefill}
        texts |= {"n": f"{row.n}", "left out": row.left_out + (f" ({row.cut} cut)" if row.cut else "")}
        if row.mean is None or row.kept is None:
            return texts | {"score": f"none: {row.problem}", "n": "0"}
        texts |= {"kept": f"{row.kept:.1%}", "KV MB": f"{row.kv_bytes / 1e6:.2f}", "score": _mean(row.mean, row.error)}
        texts |= {OVER: f"{row.over_budget} of {row.n}" if row.over_budget else ""}
        if paired is not None:
            p = "< 0.001" if paired.p < 0.001 else f"{paired.p:.3f}"
            texts |= {"difference": _interval(paired), "p": p}
        if self.nats is not None:
            texts |= {"nats": _mean(*self.nats), "hits": "" if row.hits is None else f"{row.hits:.4f}"}
        if self.paired_nats is not None:
            texts |= {"nats difference": _interval(self.paired_nats)}
        return texts


@dataclass(frozen=True)
class Wins:
    """Every pair of policies that hold equally much at a budget, and the full cache beside each of them.

    Attributes:
        names: the P policies, with the shares that they hold.
        share: `[P, P]` share of the tasks in which the row's mean is better than the column's, a tie being half.
        certain: `[P, P]` how many of these tasks show it with p below 0.05.
        tasks: in how many tasks both may be paired; see :func:`ag.evaluate.comparison.shares.may_pair`.
    """

    names: list[str]
    share: NDArray[np.float64]
    certain: NDArray[np.int64]
    tasks: NDArray[np.int64]


@dataclass(frozen=True)
class Comparison:
    """All cells, in their order.

    Attributes:
        folder: where the results are.
        baseline: the policy that others are tested against.
        entries: the cells.
        hidden: names of the rows in the folder that earlier commands asked for and this one does not.
    """

    folder: Path
    baseline: str
    entries: list[Entry]
    hidden: Sequence[str] = ()

    @classmethod
    def of(cls, config: CompareConfig, cells: Sequence[Cell], rows: Mapping[str, Row], results: Results) -> Comparison:
        """Gather what belongs to the cells, and test each against the baseline."""
        entries = []
        for cell in cells:
            # an earlier run may have called it otherwise
            row = replace(rows[cell.key], label=cell.label, policy=repr(cell.policy))
            outcomes = results.outcomes(row) if row.problem is None else []
            entries.append(Entry(row, outcomes, results.views(row.key), cell.policy.spec))
        baseline = config.called.get(config.baseline, config.baseline)
        shown = {cell.key for cell in cells}
        hidden = [f"{row.task}: {row.name}" for key, row in results.rows().items() if key not in shown]
        tested = [_tested(entry, baseline, entries) for entry in entries]
        return cls(results.folder, baseline, tested, hidden)

    @property
    def failed(self) -> list[Entry]:
        """The cells without a result."""
        return [entry for entry in self.entries if entry.row.problem is not None]

    @property
    def tasks(self) -> list[str]:
        """The tasks, in their order."""
        return list(dict.fromkeys(entry.row.task for entry in self.entries))

    @property
    def labels(self) -> list[str]:
        """The policies as they were listed, in their order."""
        return list(dict.fromkeys(entry.row.label for entry in self.entries))

    @property
    def names(self) -> list[str]:
        """The policies with their budgets, in their order."""
        return list(dict.fromkeys(entry.name for entry in self.entries))

    @property
    def meanings(self) -> dict[str, str]:
        """What the names stand for that do not say it themselves: labels, and shortened paths."""
        return {entry.name: entry.row.policy for entry in self.entries if entry.row.label != str(entry.spec)}

    @property
    def budgets(self) -> list[str]:
        """The budgets, in their order."""
        return list(dict.fromkeys(entry.budget for entry in self.entries if entry.budget))

    def shown(self, label: str) -> str:
        """Return what legends call a policy: its label and the shares that it holds."""
        shares = held([entry for entry in self.entries if entry.row.label == label])
        return f"{label} ({shares})" if shares else label

    def of_task(self, task: str) -> list[Entry]:
        """Return the entries of a task."""
        return [entry for entry in self.entries if entry.row.task == task]

    def baseline_of(self, entry: Entry) -> Entry | None:
        """Return what an entry was tested against; None for the baseline itself and where either has no result."""
        return _baseline(entry, self.baseline, self.entries)

    def columns(self, task: str) -> tuple[str, ...]:
        """Return the columns of a task's table."""
        measured = any(entry.nats is not None for entry in self.of_task(task))
        over = any(entry.row.over_budget for entry in self.of_task(task))
        absent = {*(() if measured else NATS), *(() if over else (OVER,))}
        return tuple(column for column in COLUMNS if column not in absent)

    def counted(self, task: str) -> str:
        """Say how many samples of a task were run, in its unit, how many were left out and why, and when was asked.

        Samples that a policy cannot change are counted too: see :meth:`ag.evaluate.comparison.cells.Cell.untouched`.
        """
        rows = [entry.row for entry in self.of_task(task)]
        row = max(rows, key=lambda row: row.n)
        said = [f"{row.n} {unit(task)}, left out: {row.left_out}"]
        if row.question is not None:
            said.append(f"question {row.question} eviction")
        if untouched := max((row.untouched or 0 for row in rows if row.n), default=0):
            said.append(f"{untouched} with answers of one token alone, which eviction after the prompt cannot change")
        return "; ".join(said)

    def uninformative(self, task: str) -> str:
        """Say that the model cannot do a task, as its full cache shows; empty where it can, or where nobody knows."""
        for row in (entry.row for entry in self.of_task(task) if not entry.evicts):
            if row.mean is not None and row.floor is not None and row.mean <= row.floor:
                return f"not informative for this model: {row.metric} {row.mean:.4f} with the full cache"
        return ""

    @property
    def averaged(self) -> list[str]:
        """The metrics that several tasks share and whose mean over these tasks says something."""
        metrics = [self.of_task(task)[0].row for task in self.tasks]
        names = [row.metric for row in metrics if row.higher_is_better]
        return [name for name in dict.fromkeys(names) if names.count(name) > 1]

    def leaders(self) -> list[tuple[str, list[Row | None], list[float | None]]]:
        """Return for each policy and budget its rows by task, and its means over the tasks of each averaged metric."""
        lines = []
        for name in self.names:
            found = {entry.row.task: entry.row for entry in self.entries if entry.name == name}
            averages = []
            for metric in self.averaged:
                means = [row.mean for row in found.values() if row.metric == metric]
                scores = [mean for mean in means if mean is not None]
                averages.append(sum(scores) / len(scores) if len(scores) == len(means) else None)
            lines.append((name, [found.get(task) for task in self.tasks], averages))
        return lines

    def wins(self, budget: str) -> Wins:
        """Compare every pair of policies that hold equally much at a budget, and the full cache with each of them."""
        part = {id(entry) for task in self.tasks for entry in at_budget(self.of_task(task), budget)}
        entries = [one for one in self.entries if one.outcomes and (id(one) in part or not one.evicts)]
        names = list(dict.fromkeys(entry.name for entry in entries))
        better, certain, tasks = (np.zeros((len(names), len(names))) for _ in range(3))
        for task in self.tasks:
            mine = [entry for entry in entries if entry.row.task == task]
            if not mine:
                continue
            at = np.ix_(*[[names.index(entry.name) for entry in mine]] * 2)
            gain, p = _gains(mine)
            paired = np.array([[may_pair(one, other) for other in mine] for one in mine])
            better[at] += paired * np.where(gain == 0, 0.5, gain > 0)
            certain[at] += paired & (gain > 0) & (p < SIGNIFICANT)
            tasks[at] += paired
        share = np.divide(better, tasks, out=np.full_like(better, np.nan), where=tasks > 0)
        shown = [f"{name} ({held([entry for entry in entries if entry.name == name])})" for name in names]
        return Wins(shown, share, certain.astype(np.int64), tasks.astype(np.int64))

    def apart(self) -> list[str]:
        """Say which results are not compared, because they hold another share than those beside them."""
        found = []
        for task in self.tasks:
            entries = self.of_task(task)
            found += [f"{task}: {said}" for budget in self.budgets for said in apart(entries, budget)]
            bases = [(one, _baseline_at(one, self.baseline, self.entries)) for one in entries if one.paired is None]
            found += [f"{task}: {differing(one, base)}" for one, base in bases if base and not may_pair(one, base)]
        return list(dict.fromkeys(found))

    def layers(self) -> tuple[list[str], NDArray[np.float64]]:
        """Return the share that each layer kept of the viewed prompts, ``[P, L]``, of the policies that evict."""
        names, shares = [], []
        for name in self.names:
            views = [view for one in self.entries if one.name == name and one.evicts for view in one.views]
            kept = sum(view.kept.sum((1, 2)) for view in views)
            if views:
                shares.append(kept / sum(view.kept[0].size for view in views))
                names.append(f"{name} ({percent(float(shares[-1].mean()))})")
        return names, np.array(shares)


def _baseline(entry: Entry, baseline: str, entries: Sequence[Entry]) -> Entry | None:
    """Return what an entry is tested against: the baseline at its budget, where both hold equally much."""
    other = _baseline_at(entry, baseline, entries)
    return other if other is not None and may_pair(entry, other) else None


def _baseline_at(entry: Entry, baseline: str, entries: Sequence[Entry]) -> Entry | None:
    """Return the baseline at an entry's budget, else the one without a budget; None without a result of both."""
    same = [other for other in entries if other.row.task == entry.row.task and other.row.label == baseline]
    for budget in (entry.budget, ""):
        other = next((other for other in same if other.budget == budget), None)
        if other is not None and other.outcomes and entry.outcomes and other.row.key != entry.row.key:
            return other
    return None


def _tested(entry: Entry, baseline: str, entries: Sequence[Entry]) -> Entry:
    """Compare an entry with the baseline."""
    other = _baseline(entry, baseline, entries)
    if other is None:
        return entry
    return replace(entry, paired=pair(entry, other), paired_nats=pair(entry, other, nats=True))


def pair(entry: Entry, other: Entry, nats: bool = False) -> Paired | None:
    """Compare the scores of two entries, or the nats of their right answers; None where they share no sample."""
    if nats:
        mine, theirs = _matched(*(tag_values(one.outcomes, "nats") for one in (entry, other)))
        return compare(mine, theirs) if mine else None
    mine, theirs = _matched(entry.scores, other.scores)
    return compare(mine, theirs, _parts(entry, other)) if mine else None


def _parts(one: Entry, other: Entry) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]] | None:
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


def _matched(mine: Mapping[str, float], theirs: Mapping[str, float]) -> tuple[list[float], list[float]]:
    """Return the numbers of the samples that both have, in the same order."""
    both = [sample for sample in mine if sample in theirs]
    return [mine[sample] for sample in both], [theirs[sample] for sample in both]


def _mean(mean: float, error: float | None) -> str:
    return f"{mean:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _interval(paired: Paired) -> str:
    return f"{paired.difference:+.4f} [{paired.low:+.4f}, {paired.high:+.4f}]"


def _gains(entries: Sequence[Entry]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how much better each of P entries of a task is than each other, and how likely by chance, ``[P, P]``."""
    scored = [entry.scores for entry in entries]
    shared = [sample for sample in scored[0] if all(sample in scores for scores in scored)]
    scores = np.array([[one[sample] for sample in shared] for one in scored])
    scores = scores if entries[0].row.higher_is_better else -scores
    differences = scores[:, None] - scores[None]
    p = sign_flips(differences.reshape(-1, len(shared))).reshape(len(entries), -1)
    return differences.mean(-1), p
