"""A comparison as a table with a row for each cell, paired with the baseline; and which rows may be compared."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame

from ag.config.spec import PolicySpec
from ag.errors import UserError
from ag.evaluate.comparison.folder import FinishedCell, Summary, comparable_samples, tag_values
from ag.evaluate.comparison.statistics import Paired, Vector, compare, mean_and_error
from ag.evaluate.tasks import Outcome
from ag.evaluate.tasks.base import POSITION

Row = Any  # a row of Comparison.rows, with its columns as attributes; what was not measured is NaN
MAX_SHARE_DIFFERENCE = 0.02  # of two kept shares that count as equal, as a share of the prompt
MAX_RELATIVE_DIFFERENCE = 0.2  # of these, relative to the smaller one: stricter for small shares
NOT_COMPARED = "Not compared with each other, because their kept shares differ:"
#: Types of columns by the annotations of a summary's fields; all others hold objects.
KINDS: dict[Any, type] = {"float": float, "float | None": float, "int | None": float, "int": int, "bool": bool}
TYPES = {field.name: KINDS[field.type] for field in fields(Summary) if field.type in KINDS}
TYPES |= {"evicts": bool, "gated": bool, "tokens": int, "prompt_kept": float, "nats_error": float}


class Comparison:
    """The results of a comparison.

    ``rows`` has a row for each cell, in order. The columns are the fields of :class:`Summary`, with the budget as text
    ("1" is a token, "1.0" the whole prompt, empty without a budget), and: ``name`` (policy and budget); ``evicts`` and
    ``gated``; ``prompt_kept``, the kept share as a mean over prompts; ``tokens`` of all prompts; ``memory``, the bytes
    as a share of the full cache's on the same samples; ``nats_error``; and the paired difference to the baseline,
    ``difference`` of scores and ``nats_difference`` of nats, with ``..._error``, ``..._low``, ``..._high`` (95 %
    interval) and ``..._p``.

    All policies are paired with the ``baseline``, a label, and every verdict names ``mine``, a label; None: the last
    one. ``data`` says where the samples came from, and ``hidden`` names the cells in the folder that only earlier
    commands list.
    """

    def __init__(
        self,
        cells: Sequence[FinishedCell],
        folder: Path,
        baseline: str = "full",
        mine: str | None = None,
        data: str = "",
        hidden: Sequence[str] = (),
    ) -> None:
        self.cells = {cell.summary.key: cell for cell in cells}
        self.folder, self.baseline, self.data, self.hidden = folder, baseline, data, hidden
        self.mine = cells[-1].summary.label if mine is None else mine
        self._pairs: dict[tuple[str, str, str], Paired | None] = {}
        rows = DataFrame([_row(cell) for cell in cells], dtype=object).astype(TYPES)
        unpaired = list(rows.itertuples(index=False))
        self._baselines = {(row.task, row.budget): row for row in reversed(unpaired) if row.label == baseline}
        full_rows = sorted((row for row in unpaired if not row.evicts and row.n), key=stores_codes)
        self._full_rows = {row.task: row for row in full_rows[::-1]}  # the first of each, in the model's type if any is
        self.rows = rows.join(DataFrame([self._comparisons(row) for row in unpaired], dtype=float))
        self.results: list[Row] = list(self.rows.itertuples(index=False))
        self.failed = [row for row in self.results if row.problem is not None]  # without a result
        self.tasks: list[str] = list(rows.task.unique())

    def of_task(self, task: str) -> list[Row]:
        """Return the rows of a task."""
        return [row for row in self.results if row.task == task]

    def budgets(self, task: str) -> list[str]:
        """Return the budgets of a task as text; an empty text alone if its policies have none."""
        return list(dict.fromkeys(row.budget for row in self.of_task(task) if row.budget)) or [""]

    def at(self, task: str, budget: str) -> list[Row]:
        """Return the rows of a task at a budget, and those without a budget."""
        return [row for row in self.of_task(task) if row.budget in ("", budget)]

    def outcomes(self, row: Row) -> list[Outcome]:
        """Return the outcomes of a row's samples."""
        return self.cells[row.key].outcomes

    def part_kinds(self, task: str) -> list[str]:
        """Return the kinds of the parts of a task's samples, in their order."""
        outcomes = (outcome for row in self.of_task(task) for outcome in self.outcomes(row))
        return list(dict.fromkeys(kind for outcome in outcomes for kind in outcome.parts))

    def paired(self, row: Row, other: Row, tag: str = "") -> Paired | None:
        """Compare the scores of two rows by sample, or a tag such as ``nats``. None: they share no sample."""
        key = row.key, other.key, tag
        if key not in self._pairs:
            pair = self.outcomes(row), self.outcomes(other)
            scores, other_scores = (tag_values(outcomes, tag) for outcomes in pair)
            common = [each for each in comparable_samples(*pair) if each in scores and each in other_scores]
            blocks = None if tag else _block_differences(*pair, common)
            my_scores, their_scores = ([each[sample] for sample in common] for each in (scores, other_scores))
            self._pairs[key] = compare(my_scores, their_scores, blocks) if common else None
        return self._pairs[key]

    def common_means(self, row: Row, other: Row, field: str) -> tuple[float, float]:
        """Return the means of a field of the outcomes, such as ``score``, of two rows over the samples that both have.

        NaN: they share no sample.
        """
        pair = self.outcomes(row), self.outcomes(other)
        common = {*comparable_samples(*pair)}
        one, two = ([getattr(each, field) for each in outcomes if each.sample in common] for outcomes in pair)
        return (sum(one) / len(one), sum(two) / len(two)) if common else (math.nan, math.nan)

    def baseline_of(self, row: Row) -> Row | None:
        """Return the baseline's row at this budget if the kept shares are equal."""
        other = self.baseline_at(row)
        return other if other is not None and comparable(row, other) else None

    def baseline_at(self, row: Row) -> Row | None:
        """Return the baseline's row at this budget, else its row without a budget. None: it has neither."""
        for budget in (row.budget, ""):
            other = self._baselines.get((row.task, budget))
            if other is not None and other.n and row.n and other.key != row.key:
                return other
        return None

    def uninformative(self, task: str) -> str:
        """Return a remark if the model cannot do a task, as its full cache shows; else an empty text."""
        full = self._full_rows.get(task)
        if full is None or not (full.mean <= full.floor if full.higher_is_better else full.mean >= full.floor):
            return ""
        return f"not informative for this model: {full.metric} {full.mean:.4f} with the full cache"

    def _comparisons(self, row: Row) -> dict[str, float | None]:
        """Return the columns that compare a row: its memory, and its differences to the baseline."""
        base, full, columns = self.baseline_of(row), self._full_rows.get(row.task), dict[str, float | None]()
        kv_bytes, full_bytes = (math.nan, math.nan) if full is None else self.common_means(row, full, "kv_bytes")
        columns["memory"] = kv_bytes / full_bytes if full_bytes else math.nan
        for tag, name in (("", "difference"), ("nats", "nats_difference")):
            paired = None if base is None else self.paired(row, base, tag)
            columns[name] = math.nan if paired is None else paired.difference
            columns |= {f"{name}_{field}": getattr(paired, field, None) for field in ("error", "low", "high", "p")}
        return columns


def _row(cell: FinishedCell) -> dict[str, Any]:
    """Return the columns of a cell that need no other cell."""
    summary, outcomes, _ = cell
    [policy] = ast.parse(summary.policy, mode="eval").body.args[:1]  # type: ignore[attr-defined]
    text, nats = ast.literal_eval(policy), list(tag_values(outcomes, "nats").values())
    try:
        spec = PolicySpec.parse(text)
    except UserError:  # of a plugin that is not loaded: a policy that evicts and reads no gates
        spec = PolicySpec(text)
    return asdict(summary) | {
        "budget": "" if summary.budget is None else str(summary.budget),
        "name": summary.name,
        "spec": str(spec),
        "evicts": spec.evicts,
        "gated": spec.reads_gates,
        "prompt_kept": sum(outcome.kept for outcome in outcomes) / len(outcomes) if outcomes else None,
        "tokens": sum(outcome.tokens for outcome in outcomes),
        "nats_error": mean_and_error(nats)[1] if nats else None,
    }


def _block_differences(
    outcomes: Sequence[Outcome], other_outcomes: Sequence[Outcome], samples: Sequence[str]
) -> list[tuple[Vector, Vector]] | None:
    """Return the differences of blocks and their tokens for each of the samples. None: there are no blocks."""
    others_by_sample, blocks = {outcome.sample: outcome for outcome in other_outcomes}, []
    for outcome in outcomes:
        if outcome.sample in samples:
            pair = outcome, others_by_sample[outcome.sample]
            nats, other = (one.parts.get(POSITION, {}).get("nats", {}) for one in pair)
            if not nats or nats.keys() != other.keys():
                return None
            differences = np.array([value - other[start] for start, value in nats.items()])
            blocks.append((differences, np.diff([*map(int, nats), outcome.tokens]).astype(np.float64)))
    return blocks


def part_values(outcomes: Sequence[Outcome], kind: str, measure: str = "nats") -> DataFrame:
    """Return a measure of the parts of each sample, ``[samples, parts]``; ``score`` is one that blocks do not have."""
    values = {outcome.sample: outcome.parts.get(kind, {}).get(measure, {}) for outcome in outcomes}
    frame = DataFrame.from_dict(values, orient="index")
    numbered = all(str(name).isdigit() for name in frame.columns)
    return frame.rename(columns=int)[sorted(map(int, frame.columns))] if numbered else frame


class AtBudget(NamedTuple):
    """The rows of a task that evict, at a budget."""

    compared: list[Row]  # with each other
    apart: list[tuple[Row, Row]]  # whose kept share is another, each with the reference


def at_budget(rows: Sequence[Row], budget: str) -> AtBudget:
    """Return which rows of a task may be compared at a budget, and which may not.

    The reference has the smallest kept share at this budget, since a policy may protect more than the budget. A policy
    without a budget (flags) takes part if its kept share is equal. An empty budget selects all policies without one.
    """
    evicting = [row for row in rows if row.n and row.evicts and row.budget in ("", budget)]
    at = [row for row in evicting if row.budget == budget]
    if not (budget and at):
        return AtBudget([] if budget else evicting, [])
    lowest = min(at, key=lambda row: (row.kept, row.prompt_kept))
    alike = {row.key for row in evicting if same_kept_share(row, lowest)}
    apart = [(row, lowest) for row in evicting if row.key not in alike]
    return AtBudget([row for row in evicting if row.key in alike], apart)


def uncompared_results(comparison: Comparison) -> list[str]:
    """Return sentences on the rows that are not compared, because their kept shares differ."""
    pairs = []
    for task in comparison.tasks:
        rows = comparison.of_task(task)
        for budget in comparison.budgets(task):
            pairs += at_budget(rows, budget).apart
        bases = [(row, comparison.baseline_at(row)) for row in rows]
        pairs += [(row, base) for row, base in bases if base is not None and not comparable(row, base)]
    sentences = []
    for row, other in pairs:
        which, of = ("prompt_kept", " of a prompt on average") if shares_agree(row.kept, other.kept) else ("kept", "")
        shares = [100 * getattr(each, which) for each in (row, other)]
        sentences.append(f"{row.task}: {row.name} keeps {shares[0]:.1f} %{of}, {other.name} {shares[1]:.1f} %")
    return list(dict.fromkeys(sentences))


def stores_codes(row: Row) -> bool:
    """Whether keys and values are stored as codes of fewer bits, not in the model's type."""
    return "kv_dtype=" in row.policy


def comparable(row: Row, other: Row) -> bool:
    """Whether two rows of a task may be paired: their kept shares are equal, or one is the full cache."""
    return not (row.evicts and other.evicts) or same_kept_share(row, other)


def same_kept_share(row: Row, other: Row) -> bool:
    """Whether two rows have equal kept shares, both over all tokens and as a mean over prompts.

    These differ if prompts differ in length: a budget in tokens is a large share of a short prompt and a small share of
    a long one, flags keep about equal shares of both. Memory is a mean over tokens, the score a mean over prompts. If
    the model writes the texts, whose lengths differ between policies, equal numbers of cached tokens suffice, over
    equally many texts.
    """
    if shares_agree(row.kept, other.kept) and shares_agree(row.prompt_kept, other.prompt_kept):
        return True
    mean_tokens = (row.tokens + other.tokens) / 2
    return (
        row.n == other.n
        and row.tokens != other.tokens
        and shares_agree(row.kept * row.tokens / mean_tokens, other.kept * other.tokens / mean_tokens)
    )


def shares_agree(share: float, other: float) -> bool:
    """Whether two kept shares count as equal: they differ by at most 2 % of the prompt and a fifth of the smaller."""
    largest = min(MAX_SHARE_DIFFERENCE, MAX_RELATIVE_DIFFERENCE * min(share, other))
    return abs(share - other) <= largest + 1e-9  # 0.27 - 0.25 is a little over 0.02


def percent(share: float) -> str:
    """Return a share as text: ``25 %``, and with a decimal below ten."""
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f} %"
