"""Scores along a text: the blocks that a stream's outcomes are tagged with, as a table and as lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ag.evaluate.comparison.findings import Comparison, Entry
from ag.evaluate.comparison.statistics import mean_and_error
from ag.evaluate.tasks import Outcome

END = "held@end"
MOST = 12  # columns of a table
NOTE = (
    "Of {0} the nats a token in blocks that begin at these positions, of the others the difference to it; without a "
    "sign the nats of those that hold another share than it does."
)


def curve(outcomes: Sequence[Outcome]) -> dict[int, list[float]]:
    """Return the nats of all texts by block, ascending."""
    found: dict[int, list[float]] = {}
    for outcome in outcomes:
        for start, nats in outcome.blocks.items():
            found.setdefault(start, []).append(nats)
    return dict(sorted(found.items()))


def difference(mine: Entry, theirs: Entry) -> dict[int, tuple[float, float | None]]:
    """Return by block the mean over texts of one policy's nats minus another's, with its standard error."""
    others = {outcome.sample: outcome.blocks for outcome in theirs.outcomes}
    found: dict[int, list[float]] = {}
    for outcome in mine.outcomes:
        other: dict[int, float] = others.get(outcome.sample, {})
        for start, nats in outcome.blocks.items():
            if start in other:
                found.setdefault(start, []).append(nats - other[start])
    return {start: mean_and_error(values) for start, values in sorted(found.items())}


def table(comparison: Comparison, task: str) -> tuple[list[str], list[list[str]]] | None:
    """Return head and lines of a table of a task by position, None where its outcomes have no curve.

    It holds the baseline's nats, the others' differences to it (nats too where it has no result), and the share that
    each held at the end. Of more than 12 blocks it shows as many as are evenly spaced.
    """
    entries = [entry for entry in comparison.of_task(task) if entry.outcomes and entry.outcomes[0].blocks]
    if not entries:
        return None
    starts = list(dict.fromkeys(start for entry in entries for start in curve(entry.outcomes)))
    starts = sorted(starts)[:: -(-len(starts) // MOST)]
    lines = []
    for entry in entries:
        base = comparison.baseline_of(entry)
        if base is None:
            cells = {start: f"{np.mean(nats):.3f}" for start, nats in curve(entry.outcomes).items()}
        else:
            cells = {start: f"{mean:+.3f}" for start, (mean, _) in difference(entry, base).items()}
        ends = [float(outcome.tags[END]) for outcome in entry.outcomes if END in outcome.tags]
        held = f"{np.mean(ends):.1%}" if ends else ""
        lines.append([entry.name, held, *(cells.get(start, "") for start in starts)])
    return ["policy", "held at the end", *(f"from {start:,}" for start in starts)], lines
