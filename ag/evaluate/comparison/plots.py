"""The plots of a comparison as PNG files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ag.evaluate.comparison.findings import Comparison, Entry, Wins
from ag.evaluate.comparison.lead import Leading, full_cache, leading, lines
from ag.evaluate.comparison.positions import curve, difference
from ag.evaluate.comparison.shares import held
from ag.gates.figures import DPI

# Okabe and Ito's palette without black, which is the text's
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C", "#A89B00")
MARKERS = "osD^vP*X"
DASHES = ("-", "--", ":", "-.")
SMALL = 0.01  # nats, below which the scale of the leading curves is linear
LONGEST = 36  # characters of a name


def draw(comparison: Comparison) -> Iterator[tuple[str, Figure]]:
    """Draw all plots there are results for; gives a file's name without its ending, and the plot."""
    if tasks := leading(comparison):
        yield "lead", lead(comparison, tasks)
    for task in comparison.tasks:
        entries = [entry for entry in comparison.of_task(task) if entry.outcomes]
        if entries:
            yield f"quality_{task}", quality(task, entries, comparison.labels)
        if any(entry.nats is not None for entry in entries):
            yield f"nats_{task}", quality(task, entries, comparison.labels, nats=True)
        if any("depth" in outcome.tags for entry in entries for outcome in entry.outcomes):
            yield f"depths_{task}", depths(task, entries)
        if any(outcome.blocks for entry in entries for outcome in entry.outcomes):
            yield f"positions_{task}", positions(task, entries, comparison.labels)
    wins = [(budget, comparison.wins(budget)) for budget in comparison.budgets]
    if any(len(matrix.names) > 1 for _, matrix in wins):
        yield "wins", win_matrix(wins)
    names, shares = comparison.layers()
    if names:
        yield "layers", kept_by_layer(names, shares)


def short(name: str) -> str:
    """Leave out the middle of a long name, such as that of gates in a deep folder."""
    return name if len(name) <= LONGEST else f"{name[:9]}…{name[10 - LONGEST :]}"


def style_shares(axes: Axes) -> None:
    """Set up the axes of a plot over kept shares."""
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("kept share of the prompt, measured")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


def legend_beside(axes: Axes) -> None:
    """Put the legend to the right of the plot."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)


def lead(comparison: Comparison, tasks: Sequence[Leading]) -> Figure:
    """Draw nats over the full cache by kept share, with 95 % intervals, gates thick and above all others."""
    figure = Figure(figsize=(9.6, 3.6), dpi=DPI, layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        drawn = lines(comparison, task)
        for line in drawn:
            xs, ys = ([getattr(point, name) for point in line.points] for name in "xy")
            low, high = zip(*(point.ends for point in line.points), strict=True)
            errors = np.abs(np.array([low, high]) - ys)
            colour = COLOURS[0] if line.gated else COLOURS[1 + line.number % (len(COLOURS) - 1)]
            style = {"linewidth": 2.6, "zorder": 9} if line.gated else {"linewidth": 1.2, "alpha": 0.9}
            marker = MARKERS[line.number % len(MARKERS)]
            axes.errorbar(xs, ys, errors, color=colour, marker=marker, label=short(line.name), capsize=2, **style)
        axes.axhline(0, color="#555555", linewidth=0.8)
        axes.set_yscale("symlog", linthresh=SMALL)
        axes.set_ylim(bottom=min([-SMALL, *(point.ends[0] for line in drawn for point in line.points)]))
        style_shares(axes)
        axes.set_ylabel("nats over the full cache" if full_cache(task) else "nats")
        axes.set_title(f"{task.title}, {task.entries[0].row.n} samples", fontsize=10)
    legend_beside(axes)
    return figure


def quality(task: str, entries: Sequence[Entry], labels: Sequence[str], nats: bool = False) -> Figure:
    """Draw the metric, or the nats of right answers, against the share that was really kept, with standard errors."""
    figure = Figure(figsize=(8, 4.2), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for label in dict.fromkeys(entry.row.label for entry in entries):
        mine = [entry for entry in entries if entry.row.label == label]
        points = sorted(point for entry in mine if (point := entry.measure(nats)) is not None)
        if not points:
            continue
        number = labels.index(label)
        kept, means, errors = map(list, zip(*points, strict=True))
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number // len(COLOURS) % len(MARKERS)]
        if not mine[0].evicts:  # a level to hold the others against
            axes.axhline(means[0], color=colour, linestyle="--", linewidth=1, alpha=0.7)
        name = short(f"{label} ({held(mine)})")
        axes.errorbar(kept, means, errors, color=colour, marker=marker, label=name, capsize=2, markersize=5)
    style_shares(axes)
    which = "higher" if entries[0].row.higher_is_better and not nats else "lower"
    axes.set_ylabel(f"{'nats per answer token' if nats else entries[0].row.metric} ({which} is better)")
    axes.set_title(f"{task}: {entries[0].row.n} samples", fontsize=11)
    legend_beside(axes)
    return figure


def win_matrix(panels: Sequence[tuple[str, Wins]]) -> Figure:
    """Draw in how many tasks the policy of a row is better than that of a column, for each budget."""
    most = max(len(wins.names) for _, wins in panels)
    size = 2.4 + 0.5 * most
    figure = Figure(figsize=(len(panels) * (size + 1.2), size), dpi=DPI, layout="constrained")
    for axes, (budget, wins) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.imshow(wins.share, cmap="PuOr", vmin=-0.5, vmax=1.5)
        names = [short(name) for name in wins.names]
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        for (row, column), share in np.ndenumerate(wins.share):
            if row != column and wins.tasks[row, column]:
                text = f"{share * wins.tasks[row, column]:g}\n({wins.certain[row, column]})"
                axes.text(column, row, text, ha="center", va="center", fontsize=7)
        axes.set_title(f"budget {budget}", fontsize=10)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    figure.suptitle(f"Tasks of {panels[0][1].tasks.max()} won by the row (with p < 0.05)", fontsize=11)
    return figure


def kept_by_layer(names: Sequence[str], shares: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> Figure:
    """Draw the share that each layer kept of the viewed prompts, ``[P, L]``."""
    layers = shares.shape[1]
    width = float(np.clip(3.2 + 0.25 * layers, 5, 14))
    figure = Figure(figsize=(width, 1.6 + 0.28 * len(names)), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="YlGnBu", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(names)), [short(name) for name in names], fontsize=8)
    every = -(-layers // 32)
    axes.set_xticks(range(0, layers, every), [str(layer) for layer in range(0, layers, every)], fontsize=8)
    axes.set_xlabel("layer")
    axes.set_title("Kept share by layer", fontsize=11)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=axes, format=PercentFormatter(1, decimals=0), pad=0.02)
    bar.outline.set_visible(False)
    return figure


def depths(task: str, entries: Sequence[Entry]) -> Figure:
    """Draw the mean score by length and depth of the needle, a panel for each policy."""
    columns = min(4, len(entries))
    lines = -(-len(entries) // columns)
    figure = Figure(figsize=(1 + 2.6 * columns, 0.6 + 2 * lines), dpi=DPI, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in grid[len(entries) :]:
        axes.set_visible(False)
    for axes, entry in zip(grid, entries, strict=False):
        found = [o for o in entry.outcomes if "depth" in o.tags and "length" in o.tags]
        lengths, depths = (sorted({o.tags[name] for o in found}) for name in ("length", "depth"))
        cells = [
            [
                np.mean([o.score for o in found if (o.tags["length"], o.tags["depth"]) == (length, depth)] or [np.nan])
                for length in lengths
            ]
            for depth in depths
        ]
        axes.imshow(cells, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{float(depth):g}" for depth in depths], fontsize=7)
        axes.set_title(f"{short(entry.shown)}: {entry.row.mean:.2f}", fontsize=8)
    figure.suptitle(f"{task}: {entries[0].row.metric} by length (tokens) and depth of the needle", fontsize=11)
    return figure


def positions(task: str, entries: Sequence[Entry], labels: Sequence[str]) -> Figure:
    """Draw nats over the full cache along the text, means over samples in bins of positions.

    Without a result of the full cache, or with nothing else, the nats themselves are drawn.
    """
    figure = Figure(figsize=(8, 4), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    evicting = [entry for entry in entries if entry.evicts]
    full = next((entry for entry in entries if not entry.evicts), None) if evicting else None
    drawn = evicting if full else entries
    budgets = list(dict.fromkeys(entry.row.budget for entry in drawn))
    lowest = 0.0
    for entry in drawn:
        if full:
            bins = {start: mean for start, (mean, _) in difference(entry, full).items()}
        else:
            bins = {start: float(np.mean(nats)) for start, nats in curve(entry.outcomes).items()}
        lowest = min([lowest, *bins.values()])
        number, dashes = labels.index(entry.row.label), DASHES[budgets.index(entry.row.budget) % len(DASHES)]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        line: dict[str, Any] = {"linestyle": dashes, "linewidth": 1.4, "marker": marker, "markersize": 4}
        axes.plot(list(bins), list(bins.values()), color=colour, label=short(entry.shown), **line)
    if full:
        axes.axhline(0, color="#555555", linewidth=0.8)
        axes.set_yscale("symlog", linthresh=SMALL)
        axes.set_ylim(bottom=lowest)
    axes.set_xlabel("position in the text (tokens)")
    axes.set_ylabel("nats over the full cache" if full else entries[0].row.metric)
    axes.set_title(task, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    legend_beside(axes)
    return figure
