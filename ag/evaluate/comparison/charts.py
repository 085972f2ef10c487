"""What the charts of a comparison show, for the page and for the files: lines of points with what each of them says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ag.evaluate.comparison.findings import Comparison
from ag.evaluate.comparison.folder import tag_values
from ag.evaluate.comparison.result import Result, by_position, pair, part_names
from ag.evaluate.comparison.shares import held, shown
from ag.evaluate.comparison.statistics import bootstrap

SEVERAL = 2  # kept shares that make a curve
KEPT = "kept share of the prompt"
BYTES = "KV bytes of the full cache's"
MIX = "best mix"  # of tokens and bits
LONGEST = 36  # characters of a name


class Point(NamedTuple):
    """A point: where it is, the ends of what is drawn about it (an interval, or standard errors), and it in words."""

    x: float
    y: float
    low: float
    high: float
    text: str


class Look(NamedTuple):
    """What chooses colour and mark of a policy: its number, counted apart for gates, which share one colour."""

    number: int
    gated: bool


@dataclass(frozen=True)
class Line:
    """A policy's points."""

    look: Look
    name: str  # in the legend, with the shares that it holds
    points: Sequence[Point]  # from left to right
    level: bool = False  # whether it goes through all of the chart, to hold the others against: the full cache


@dataclass(frozen=True)
class Chart:
    """Lines over kept shares, over positions, or over numbered parts."""

    title: str  # the task, and how many samples it has
    x_label: str
    y_label: str
    lines: Sequence[Line]  # one for each policy
    zero: Look | None = None  # of what the others are differences to, a level at 0; None: these are no differences

    @property
    def over_shares(self) -> bool:
        """Whether it is drawn over shares; else over positions, in tokens, or over numbered parts."""
        return self.x_label in (KEPT, BYTES)

    @property
    def text(self) -> str:
        """All that there is to see, in words."""
        points = "; ".join(point.text for line in self.lines for point in line.points)
        return f"{self.title}: {self.y_label} by {self.x_label}. {points}"


def short(name: str) -> str:
    """Leave out the middle of a long name, such as that of gates in a deep folder."""
    return name if len(name) <= LONGEST else f"{name[:9]}…{name[10 - LONGEST :]}"


def looks(comparison: Comparison) -> dict[str, Look]:
    """Return the look of each policy, by label."""
    gated = {result.summary.label: result.is_gated for result in comparison.results}
    counts = {True: 0, False: 0}
    found = {}
    for label in comparison.labels:
        found[label] = Look(counts[gated[label]], gated[label])
        counts[gated[label]] += 1
    return found


def every(comparison: Comparison) -> dict[str, list[Chart]]:
    """Return all charts that there are results for, by the file that shows them."""
    found = {"lead": leading(comparison)}
    for task in comparison.tasks:
        found[f"quality_{task}"] = quality(comparison, task)
        found[f"nats_{task}"] = quality(comparison, task, nats=True)
        found[f"bytes_{task}"] = over_bytes(comparison, task)
        found[f"positions_{task}"] = along(comparison, task)
        for what, names in part_names(comparison.of_task(task)).items():
            if all(name.isdigit() for name in names):
                found[f"{what}s_{task}"] = along(comparison, task, what)
    return {name: drawn for name, drawn in found.items() if drawn}


def leading(comparison: Comparison) -> list[Chart]:
    """Return nats over the full cache by kept share: of the first task that asks after eviction, and of the first text.

    A task that has results at fewer than two kept shares has no curve, and one that the model cannot do says nothing.
    Intervals are those of 95 % of the paired difference; without a result of the full cache these are the nats alone.
    """
    found = []
    kinds: tuple[tuple[str, Callable[[Result], bool]], ...] = (
        ("question after eviction", _is_asked_after),
        ("continuation", _continues),
    )
    for what, belongs in kinds:
        for task in comparison.tasks:
            results = [result for result in comparison.of_task(task) if result.outcomes]
            shares = {result.summary.kept for result in results if result.evicts and belongs(result)}
            if len(shares) >= SEVERAL and not comparison.uninformative(task):
                found.append(_over_full(comparison, f"{what}: {task}", results, nats=belongs is _is_asked_after))
                break
    return found


def _is_asked_after(result: Result) -> bool:
    return result.summary.question == "after" and result.nats is not None


def _continues(result: Result) -> bool:
    return result.summary.question is None and result.summary.metric == "nats per token"


def over_bytes(comparison: Comparison, task: str) -> list[Chart]:
    """Return nats over the full cache by the bytes held, where keys and values were held in several forms, if any.

    The best mix of tokens and bits leads through the points than which none with as few bytes costs less.
    """
    results = [result for result in comparison.of_task(task) if result.outcomes]
    whole = [result.summary.kv_bytes for result in results if not result.evicts]
    nats = any(_is_asked_after(result) for result in results)
    if len(set(whole)) < SEVERAL or not (nats or any(_continues(result) for result in results)):
        return []
    chart = _over_full(comparison, task, results, nats, over=BYTES)
    best: list[Point] = []
    for point in sorted(point for line in chart.lines for point in line.points):
        if not best or point.y < best[-1].y:
            best.append(point)
    mix = Line(
        Look(len(comparison.labels), gated=False), MIX, [point._replace(text=f"{MIX}: {point.text}") for point in best]
    )
    return [replace(chart, lines=[mix, *chart.lines])]


def _over_full(comparison: Comparison, title: str, results: Sequence[Result], nats: bool, over: str = KEPT) -> Chart:
    full = next((result for result in results if not result.evicts), None)

    def point(result: Result) -> Point | None:
        if (not result.evicts and (over == KEPT or result is full)) or (measured := result.measure(nats)) is None:
            return None
        paired = None if full is None else pair(result, full, nats)
        if paired is None:
            values = np.array(list((tag_values(result.outcomes, "nats") if nats else result.scores).values()))
            place, form = (float(values.mean()), *bootstrap(values)), ".3f"
        else:
            place, form = (paired.difference, paired.low, paired.high), "+.3f"
        said = "{:{form}} nats [{:{form}}, {:{form}}]".format(*place, form=form)
        if over == BYTES and full is not None:
            share = result.summary.kv_bytes / full.summary.kv_bytes
            return Point(share, *place, f"{result.name}: {said} in {share:.1%} of the bytes")
        return Point(measured[0], *place, f"{result.summary.label}: {said} at {measured[0]:.1%} kept")

    y_label = "nats over the full cache" if full else "nats"
    lines = _lines(comparison, results, point)
    return Chart(_titled(title, results), over, y_label, lines, looks(comparison)[full.summary.label] if full else None)


def quality(comparison: Comparison, task: str, nats: bool = False) -> list[Chart]:
    """Return the metric of a task, or the nats of its right answers, by kept share, with standard errors, if any."""

    def point(result: Result) -> Point | None:
        if (measured := result.measure(nats)) is None:
            return None
        kept, mean, error = measured
        return Point(kept, mean, mean - error, mean + error, f"{result.summary.label}: {mean:.4f} at {kept:.1%} kept")

    results = comparison.of_task(task)
    which = "higher" if results[0].summary.higher_is_better and not nats else "lower"
    metric = "nats per answer token" if nats else results[0].summary.metric
    lines = _lines(comparison, results, point)
    title = f"{task}: nats of the right answer" if nats else task
    return [Chart(_titled(title, results), KEPT, f"{metric} ({which} is better)", lines)] if lines else []


def along(comparison: Comparison, task: str, what: str = "") -> list[Chart]:
    """Return charts of a task by position, or by numbered parts such as turns, one for each budget.

    Policies without a budget are in each. They show differences to the baseline, or nats where it has no result.
    """
    found = []
    for budget in comparison.budgets or [""]:
        results = [result for result in comparison.of_task(task) if result.budget in ("", budget)]
        bases = [(result, comparison.baseline_of(result)) for result in results if result.outcomes]
        compared = any(base is not None for _, base in bases)
        lines = []
        for result, base in bases:
            if base is None and compared:
                continue
            form = ".3f" if base is None else "+.3f"
            points = [
                Point(
                    x, y, y - (error or 0.0), y + (error or 0.0), f"{shown(result)}: {y:{form}} {what or 'from'} {x:,}"
                )
                for x, (y, error) in by_position(result, base, what).items()
            ]
            lines += [Line(looks(comparison)[result.summary.label], short(shown(result)), points)] if points else []
        if lines:
            title = f"{task} at budget {budget}" if budget else task
            y_label = f"nats a token over {comparison.baseline}" if compared else "nats a token"
            zero = looks(comparison).get(comparison.baseline) if compared else None
            x_label = what or "position in the text (tokens)"
            found.append(Chart(_titled(title, results), x_label, y_label, lines, zero))
    return found


def _lines(comparison: Comparison, results: Sequence[Result], point: Callable[[Result], Point | None]) -> list[Line]:
    """Return the line of each policy that has points, gates last, so that they are drawn over the others."""
    found = []
    for label, look in looks(comparison).items():
        mine = [result for result in results if result.summary.label == label]
        points = sorted(made for result in mine if (made := point(result)) is not None)
        if points:
            found.append(Line(look, f"{short(label)} ({held(mine)})", points, level=not mine[0].evicts))
    return sorted(found, key=lambda line: line.look.gated)


def _titled(title: str, results: Sequence[Result]) -> str:
    return f"{title}, {max(result.summary.n for result in results)} samples"
