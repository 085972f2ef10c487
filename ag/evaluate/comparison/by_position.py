"""Scores along a text, by the blocks that a stream's outcomes are tagged with."""

from __future__ import annotations

from collections.abc import Sequence

from ag.evaluate.comparison.result import Result
from ag.evaluate.comparison.statistics import mean_and_error
from ag.evaluate.tasks import Outcome


def curve(outcomes: Sequence[Outcome]) -> dict[int, list[float]]:
    """Return the nats of all texts by block, ascending."""
    found: dict[int, list[float]] = {}
    for outcome in outcomes:
        for start, nats in outcome.blocks.items():
            found.setdefault(start, []).append(nats)
    return dict(sorted(found.items()))


def difference(mine: Result, theirs: Result) -> dict[int, tuple[float, float | None]]:
    """Return by block the mean over texts of one policy's nats minus another's, with its standard error."""
    others = {outcome.sample: outcome.blocks for outcome in theirs.outcomes}
    found: dict[int, list[float]] = {}
    for outcome in mine.outcomes:
        other: dict[int, float] = others.get(outcome.sample, {})
        for start, nats in outcome.blocks.items():
            if start in other:
                found.setdefault(start, []).append(nats - other[start])
    return {start: mean_and_error(values) for start, values in sorted(found.items())}
