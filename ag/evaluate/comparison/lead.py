"""The two curves that lead the page: what eviction costs when a question comes after it, and when a text goes on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from ag.evaluate.comparison.charts import Line, Point, chart
from ag.evaluate.comparison.findings import Comparison, Entry, pair
from ag.evaluate.comparison.results import tag_values
from ag.evaluate.comparison.statistics import bootstrap

SEVERAL = 2  # kept shares that make a curve


def looks(comparison: Comparison) -> dict[str, tuple[int, bool]]:
    """Return by label the number that chooses colour and shape, counted apart for gates, and whether it is gates."""
    gated = {entry.row.label: entry.is_gated for entry in comparison.entries}
    counts = {True: 0, False: 0}
    found = {}
    for label in comparison.labels:
        found[label] = counts[gated[label]], gated[label]
        counts[gated[label]] += 1
    return found


class Leading(NamedTuple):
    """A task that leads.

    Attributes:
        title: what it measures, and its name.
        entries: its results.
        nats: whether nats of right answers count, in place of the metric, which is nats itself.
    """

    title: str
    entries: list[Entry]
    nats: bool


def lead(comparison: Comparison) -> list[tuple[str, Markup]]:
    """Return titles and charts of the tasks that lead."""
    return [(one.title, curve(comparison, one)) for one in leading(comparison)]


def leading(comparison: Comparison) -> list[Leading]:
    """Return the first task that asks after eviction, and the first continuation, with nats.

    A task that has results at fewer than two kept shares has no curve, and one that the model cannot do says nothing.
    """
    found = []
    for what, belongs in (("question after eviction", _is_asked_after), ("continuation", _continues)):
        for task in comparison.tasks:
            entries = [entry for entry in comparison.of_task(task) if entry.outcomes]
            shares = {entry.row.kept for entry in entries if entry.evicts and belongs(entry)}
            if len(shares) >= SEVERAL and not comparison.uninformative(task):
                found.append(Leading(f"{what}: {task}", entries, nats=belongs is _is_asked_after))
                break
    return found


def _is_asked_after(entry: Entry) -> bool:
    return entry.row.question == "after" and entry.nats is not None


def _continues(entry: Entry) -> bool:
    return entry.row.question is None and entry.row.metric == "nats per token"


def full_cache(task: Leading) -> Entry | None:
    """Return the task's result without eviction."""
    return next((entry for entry in task.entries if not entry.evicts), None)


def curve(comparison: Comparison, task: Leading) -> Markup:
    """Draw nats over those of the full cache by kept share, with 95 % intervals; where it is missing, the nats."""
    full, drawn = full_cache(task), lines(comparison, task)
    what = "nats over the full cache" if full else "nats"
    texts = "; ".join(point.text for one in drawn for point in one.points)
    level = "" if full is None else Line(*looks(comparison)[full.row.label][:1], full.row.label, []).colour
    return chart(f"{what} by kept share. {texts}", "kept share of the prompt", what, drawn, zero=level)


def lines(comparison: Comparison, task: Leading) -> list[Line]:
    """Return the line of each policy that evicts."""
    full, found = full_cache(task), []
    for label, (number, gated) in looks(comparison).items():
        points = []
        for entry in task.entries:
            if entry.row.label == label and entry.evicts and (measured := entry.measure(task.nats)) is not None:
                y, interval = _over(entry, full, task.nats)
                form = "+.3f" if full else ".3f"
                text = (
                    f"{label}: {y:{form}} nats [{interval[0]:{form}}, {interval[1]:{form}}] at {measured[0]:.1%} kept"
                )
                points.append(Point(measured[0], y, 0.0, text, interval))
        if points:
            found.append(Line(number, comparison.shown(label), sorted(points, key=lambda point: point.x), gated))
    return found


def _over(entry: Entry, full: Entry | None, nats: bool) -> tuple[float, tuple[float, float]]:
    if full is not None and (paired := pair(entry, full, nats)) is not None:
        return paired.difference, (paired.low, paired.high)
    values = np.array(list((tag_values(entry.outcomes, "nats") if nats else entry.scores).values()))
    return float(values.mean()), bootstrap(values)
