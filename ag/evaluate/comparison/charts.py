"""The charts of a comparison: lines of points, drawn as SVG for the page and as PNG files."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import MarkerStyle
from matplotlib.patches import PathPatch
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from ag.evaluate.comparison.result import (
    Comparison,
    Result,
    by_position,
    kept_shares_text,
    name_with_share,
    paired_difference,
    part_names,
)
from ag.evaluate.comparison.statistics import bootstrap
from ag.gates.figures import DPI

MIN_SHARES = 2  # kept shares that make a curve
KEPT = "kept share of the prompt"
BYTES = "KV bytes of the full cache's"
MIX = "best mix"  # of tokens and bits
MAX_NAME = 36  # characters of a name
FILES = Path(__file__).parent / "page_files"
LIGHT, _, _ = (FILES / "page.css").read_text(encoding="utf-8").partition("@media")
#: Hex colours by their names in the style sheet: the page's light theme, which all files use.
THEME: dict[str, str] = dict(re.findall(r"--(soft|line|gates|c\d): (#\w{6})", LIGHT))
COLOURS = tuple(colour for name, colour in THEME.items() if re.fullmatch(r"c\d", name))
MARKERS = "osD^vP*"  # their number shares no factor with the number of colours
SMALL = 0.01  # nats below which the scale of differences is linear
TIP = "point: "  # prefix of the id of a point, which becomes its title
STYLE: Any = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), THEME["soft"]),
    "axes.facecolor": "none",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 8.0,
    "grid.color": THEME["line"],
    "svg.fonttype": "none",
    "text.parse_math": False,  # a $ in a name is a character
}


class Point(NamedTuple):
    """A point, the ends of its interval or standard error, and its text."""

    x: float
    y: float
    low: float
    high: float
    text: str


class LineStyle(NamedTuple):
    """Colour and marker of a policy. All gates share one colour."""

    colour: str
    marker: str
    gated: bool

    @classmethod
    def of(cls, number: int, gated: bool) -> LineStyle:
        """Return the style of a policy by its number. Gates are numbered separately."""
        colour = THEME["gates"] if gated else COLOURS[number % len(COLOURS)]
        return cls(colour, MARKERS[number % len(MARKERS)], gated)


@dataclass(frozen=True)
class Line:
    """A policy's points."""

    style: LineStyle
    name: str  # in the legend, with the kept shares
    points: Sequence[Point]  # from left to right
    level: bool = False  # whether a single point is drawn as a level through the chart: the full cache


@dataclass(frozen=True)
class Chart:
    """Lines over kept shares, positions in tokens, or numbered parts."""

    title: str  # the task, and its number of samples
    x_label: str
    y_label: str
    lines: Sequence[Line]  # one for each policy
    zero: LineStyle | None = None  # style of the subtracted result, drawn at 0; None: nothing was subtracted

    @property
    def text(self) -> str:
        """The contents in words."""
        points = "; ".join(point.text for line in self.lines for point in line.points)
        return f"{self.title}: {self.y_label} by {self.x_label}. {points}"


@matplotlib.rc_context(STYLE)
def save(comparison: Comparison) -> None:
    """Write all plots as PNG files."""
    for name, figure in draw(comparison).items():
        figure.savefig(comparison.folder / f"{name}.png")


def draw(comparison: Comparison) -> dict[str, Figure]:
    """Return all plots by file name, without its ending."""
    figures = {name: panels(drawn) for name, drawn in all_charts(comparison).items()}
    for task in comparison.tasks:
        results = [result for result in comparison.of_task(task) if result.outcomes]
        if any("depth" in outcome.tags for result in results for outcome in result.outcomes):
            figures[f"depths_{task}"] = depths(task, results)
    return figures


def all_charts(comparison: Comparison) -> dict[str, list[Chart]]:
    """Return all charts by the name of the file that shows them."""
    charts = {"lead": lead_charts(comparison)}
    for task in comparison.tasks:
        charts[f"quality_{task}"] = quality_charts(comparison, task)
        charts[f"nats_{task}"] = quality_charts(comparison, task, "nats")
        charts[f"bytes_{task}"] = charts_by_bytes(comparison, task)
        charts[f"positions_{task}"] = charts_by_position(comparison, task)
        for part_kind, names in part_names(comparison.of_task(task)).items():
            if all(name.isdigit() for name in names):
                charts[f"{part_kind}s_{task}"] = charts_by_position(comparison, task, part_kind)
    return {name: file_charts for name, file_charts in charts.items() if file_charts}


@matplotlib.rc_context(STYLE)
def svg(chart: Chart) -> Markup:
    """Draw a chart for the page, with named colours, text as text, and its contents in words as its title."""
    figure = Figure(figsize=(3.8, 2.5), layout="constrained")
    lines_over(figure.subplots(), chart)
    return _inline(figure, Markup('class="chart" role="img"'), Markup("<title>{}</title>").format(chart.text))


def legend_mark(style: LineStyle) -> Markup:
    """Draw the mark of a policy, as a path without an id, since a page has several legends."""
    figure = Figure(figsize=(0.2, 0.2))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.7, 0.7), ylim=(-0.7, 0.7))
    axes.set_axis_off()
    marker = MarkerStyle(style.marker)
    axes.add_patch(PathPatch(marker.get_path().transformed(marker.get_transform()), color=style.colour, clip_on=False))
    return _inline(figure, Markup('class="mark" aria-hidden="true"'))


def line_styles(comparison: Comparison) -> dict[str, LineStyle]:
    """Return the style of each policy, by label."""
    gated = {result.summary.label: result.is_gated for result in comparison.results}
    counts = Counter[bool]()
    styles = {}
    for label, own in gated.items():
        styles[label] = LineStyle.of(counts[own], own)
        counts[own] += 1
    return styles


def lead_charts(comparison: Comparison) -> list[Chart]:
    """Return nats over the full cache by kept share, for the first task that asks after eviction and the first text.

    Tasks with fewer than two kept shares are left out, and tasks that the model cannot do. Intervals are 95 %
    intervals of the paired difference. Without a result of the full cache the charts show the nats themselves.
    """
    charts = []
    for subject, is_subject in (("question after eviction", _is_asked_after), ("continuation", _continues)):
        for task in comparison.tasks:
            results = [result for result in comparison.of_task(task) if result.outcomes]
            shares = {result.summary.kept for result in results if result.evicts and is_subject(result)}
            if len(shares) >= MIN_SHARES and not comparison.uninformative(task):
                charts.append(_over_full(comparison, f"{subject}: {task}", results))
                break
    return charts


def quality_charts(comparison: Comparison, task: str, tag: str = "") -> list[Chart]:
    """Return the metric of a task, or the nats of its right answers, by kept share, with standard errors."""

    def point(result: Result) -> Point | None:
        if (measured := result.measure(tag)) is None:
            return None
        kept, mean, error = measured
        return Point(kept, mean, mean - error, mean + error, f"{result.summary.label}: {mean:.4f} at {kept:.1%} kept")

    results = comparison.of_task(task)
    which = "higher" if results[0].summary.higher_is_better and not tag else "lower"
    metric = "nats per answer token" if tag else results[0].summary.metric
    lines = _lines(comparison, results, point)
    title = f"{task}: nats of the right answer" if tag else task
    return [Chart(_titled(title, results), KEPT, f"{metric} ({which} is better)", lines)] if lines else []


def charts_by_bytes(comparison: Comparison, task: str) -> list[Chart]:
    """Return nats over the full cache by bytes; empty unless keys and values were stored in several types.

    The line "best mix" connects the points with the fewest nats for their bytes.
    """
    results = [result for result in comparison.of_task(task) if result.outcomes]
    full_bytes = {result.summary.kv_bytes for result in results if not result.evicts}
    if len(full_bytes) < MIN_SHARES or not any(_is_asked_after(result) or _continues(result) for result in results):
        return []
    chart = _over_full(comparison, task, results, x_label=BYTES)
    best: list[Point] = []
    for point in sorted(point for line in chart.lines for point in line.points):
        if not best or point.y < best[-1].y:
            best.append(point)
    named = [point._replace(text=f"{MIX}: {point.text}") for point in best]
    return [replace(chart, lines=[Line(LineStyle.of(len(comparison.labels), False), MIX, named), *chart.lines])]


def charts_by_position(comparison: Comparison, task: str, part_kind: str = "") -> list[Chart]:
    """Return charts of a task by position, or by numbered parts (turns), one for each budget.

    Policies without a budget are in each chart. Charts show differences to the baseline. If the baseline has no
    result, they show nats.
    """
    charts, styles = [], line_styles(comparison)
    for budget in comparison.budgets or [""]:
        results = comparison.at(task, budget)
        bases = [(result, comparison.baseline_of(result)) for result in results if result.outcomes]
        compared = any(base is not None for _, base in bases)
        lines = []
        for result, base in bases:
            number_format = ".3f" if base is None else "+.3f"
            points = [
                Point(
                    x,
                    y,
                    y - (error or 0),
                    y + (error or 0),
                    f"{name_with_share(result)}: {y:{number_format}} {part_kind or 'from'} {x:,}",
                )
                for x, (y, error) in by_position(result, base, part_kind).items()
            ]
            if points and not (base is None and compared):
                lines.append(Line(styles[result.summary.label], shorten(name_with_share(result)), points))
        if lines:
            title = _titled(f"{task} at budget {budget}" if budget else task, results)
            y_label = f"nats a token over {comparison.baseline}" if compared else "nats a token"
            zero = styles.get(comparison.baseline) if compared else None
            charts.append(Chart(title, part_kind or "position in the text (tokens)", y_label, lines, zero))
    return charts


def _over_full(comparison: Comparison, title: str, results: Sequence[Result], x_label: str = KEPT) -> Chart:
    full = next((result for result in results if not result.evicts), None)
    tag = "nats" if any(_is_asked_after(result) for result in results) else ""

    def point(result: Result) -> Point | None:
        if (not result.evicts and (x_label == KEPT or result is full)) or (measured := result.measure(tag)) is None:
            return None
        paired = None if full is None else paired_difference(result, full, tag)
        if paired is None:
            estimate, number_format = (measured[1], *bootstrap(np.array(list(result.values(tag).values())))), ".3f"
        else:
            estimate, number_format = (paired.difference, paired.low, paired.high), "+.3f"
        text = "{:{form}} nats [{:{form}}, {:{form}}]".format(*estimate, form=number_format)
        if x_label == BYTES and full is not None:
            share = result.summary.kv_bytes / full.summary.kv_bytes
            return Point(share, *estimate, f"{result.name}: {text} in {share:.1%} of the bytes")
        return Point(measured[0], *estimate, f"{result.summary.label}: {text} at {measured[0]:.1%} kept")

    y_label, zero = (
        ("nats over the full cache", line_styles(comparison)[full.summary.label]) if full else ("nats", None)
    )
    return Chart(_titled(title, results), x_label, y_label, _lines(comparison, results, point), zero)


def _is_asked_after(result: Result) -> bool:
    return result.summary.question == "after" and result.nats is not None


def _continues(result: Result) -> bool:
    return result.summary.question is None and result.summary.metric == "nats per token"


def _lines(comparison: Comparison, results: Sequence[Result], point: Callable[[Result], Point | None]) -> list[Line]:
    """Return the line of each policy with points. Gates are last and therefore drawn on top."""
    lines = []
    for label, style in line_styles(comparison).items():
        policy_results = [result for result in results if result.summary.label == label]
        points = sorted(drawn for result in policy_results if (drawn := point(result)) is not None)
        if points:
            lines.append(
                Line(
                    style,
                    f"{shorten(label)} ({kept_shares_text(policy_results)})",
                    points,
                    level=not policy_results[0].evicts,
                )
            )
    return sorted(lines, key=lambda line: line.style.gated)


def _titled(title: str, results: Sequence[Result]) -> str:
    return f"{title}, {max(result.summary.n for result in results)} samples"


def panels(charts: Sequence[Chart]) -> Figure:
    """Draw charts beside each other, with one legend for all."""
    figure, grid = _grid(len(charts), 3, (4.2, 3.6), beside=2.6)
    handles: dict[str, Any] = {}
    for axes, chart in zip(grid, charts, strict=True):
        lines_over(axes, chart)
        axes.set_title(chart.title, fontsize=10)
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False)
    return figure


def lines_over(axes: Axes, chart: Chart) -> None:
    """Draw a chart; the id of each point is its text."""
    # over the gates' thicker line: both are visible if they coincide
    level: Any = {"linestyle": "--", "linewidth": 1, "alpha": 0.7, "zorder": 10}
    if chart.zero is not None:
        axes.axhline(0, color=chart.zero.colour, **level)
        axes.set_yscale("symlog", linthresh=SMALL, linscale=0.3)
    for line in chart.lines:
        style: dict[str, Any] = {"color": line.style.colour, "zorder": 9 if line.style.gated else 2}
        if line.level and len(line.points) == 1:
            axes.axhline(line.points[0].y, **style | level)
        xs, ys, low, high, _ = zip(*line.points, strict=True)
        axes.plot(xs, ys, linewidth=2.2 if line.style.gated else 1.2, **style)
        axes.vlines(xs, low, high, alpha=0.45, **style)
        for number, point in enumerate(line.points):
            label, tip = "_" if number else line.name, TIP + point.text
            axes.plot(point.x, point.y, line.style.marker, markersize=5, label=label, gid=tip, **style)
    axes.set_xlim(left=0)
    if chart.zero is not None:
        axes.set_ylim(bottom=min([-SMALL / 2, *(point.low for line in chart.lines for point in line.points)]))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    percent = PercentFormatter(1, decimals=0, symbol=" %")
    axes.xaxis.set_major_formatter(percent if chart.x_label in (KEPT, BYTES) else StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def depths(task: str, results: Sequence[Result]) -> Figure:
    """Draw the mean score by length and depth of the needle, a panel for each policy."""
    figure, grid = _grid(len(results), 4, (2.6, 2.0))
    for axes, result in zip(grid, results, strict=True):
        scores: dict[tuple[Any, Any], list[float]] = {}
        for outcome in result.outcomes:
            if "depth" in outcome.tags and "length" in outcome.tags:
                scores.setdefault((outcome.tags["depth"], outcome.tags["length"]), []).append(outcome.score)
        depths, lengths = (sorted({cell[which] for cell in scores}) for which in (0, 1))
        means = [[np.mean(scores.get((depth, length), np.nan)) for length in lengths] for depth in depths]
        axes.imshow(means, aspect="auto", interpolation="nearest", vmin=0, vmax=1, cmap="viridis")
        axes.set_xticks(range(len(lengths)), list(map(str, lengths)), fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set_title(f"{shorten(name_with_share(result))}: {result.summary.mean:.2f}", fontsize=8)
    figure.suptitle(f"{task}: {results[0].summary.metric} by length (tokens) and depth of the needle", fontsize=11)
    return figure


def _grid(number: int, columns: int, size: tuple[float, float], beside: float = 0.0) -> tuple[Figure, list[Axes]]:
    """Return a figure with a number of axes of a size in inches, and room beside them."""
    columns = min(columns, number)
    rows = -(-number // columns)
    figure = Figure((beside + columns * size[0], rows * size[1]), dpi=DPI, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[number:]:
        axes.set_visible(False)
    return figure, list(grid[:number])


def _inline(figure: Figure, attributes: Markup, title: str = "") -> Markup:
    """Return a figure as an element of the page, without style sheet and ids, in the page's colours."""
    file = io.StringIO()
    figure.patch.set_visible(False)
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": str(title)}):  # of ids, which no other chart may have
        figure.savefig(file, format="svg", metadata=nothing)
    element = re.search(r'(?s)<svg[^>]* viewBox="([^"]*)"[^>]*>(.*</svg>)', file.getvalue())
    assert element is not None
    body = re.sub(r"(?s)<defs>\s*<style.*?</defs>", "", element[2])
    body = re.sub(f'<g id="{TIP}([^"]*)">', r"<g><title>\1</title>", body)
    body = re.sub(r' id="[\w.]+_\d+"|font-family: [^;]*; ', "", body)
    for name, hexadecimal in THEME.items():
        body = body.replace(hexadecimal, f"var(--{name})")
    start = Markup('<svg {} viewBox="{}">{}').format(attributes, element[1], title)
    return start + Markup(body)  # nosec B704  # matplotlib escapes names


def shorten(name: str) -> str:
    """Return a name, without its middle if it is long (gates in a deep folder)."""
    return name if len(name) <= MAX_NAME else f"{name[:9]}…{name[10 - MAX_NAME :]}"
