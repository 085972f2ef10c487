"""The figures of a comparison: curves by memory, by position and by part, as PNG and SVG files and in the page."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter
from pandas import DataFrame

from ag.evaluate.comparison.folder import tag_values
from ag.evaluate.comparison.rows import POSITION, Comparison, Row, part_kinds, part_values, percent
from ag.evaluate.comparison.statistics import bootstrap
from ag.evaluate.comparison.tables import part_means
from ag.gates.figures import DPI

MIN_SHARES = 2  # kept shares that make a curve
KEPT = "kept share of the prompt"
MEMORY = "KV bytes of the full cache's"
MAX_NAME = 36  # characters of a name
FILES = Path(__file__).parent / "page_files"
LIGHT, _, _ = (FILES / "page.css").read_text(encoding="utf-8").partition("@media")
#: Hex colours by their names in the style sheet: the page's light theme, which all files use.
THEME: dict[str, str] = dict(re.findall(r"--(soft|line|gates|c\d): (#\w{6})", LIGHT))
COLOURS = tuple(name for name in THEME if re.fullmatch(r"c\d", name))
MARKERS = dict(zip("osD^vP*", "●■◆▲▼✚★", strict=True))  # their number shares no factor with the number of colours
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
    "svg.hashsalt": "ag",
    "text.parse_math": False,  # a $ in a name is a character
}


class Look(NamedTuple):
    """Colour (a name of :data:`THEME`) and marker of a policy. All gates share one colour."""

    colour: str
    marker: str


@dataclass(frozen=True)
class Chart:
    """Points over kept shares, positions in tokens, or numbered parts.

    Attributes:
        title: the task, and its number of samples.
        x_label: what ``x`` is.
        y_label: what ``y`` is.
        points: columns ``label`` (policy), ``name`` (in the legend, with the kept shares), ``x``, ``y``, ``low`` and
            ``high`` (ends of the interval or of the standard error), ``text``, and ``level`` (whether a single point is
            drawn as a level through the chart: the full cache).
        looks: the look of each policy; gates are drawn last.
        zero: label of the policy that is subtracted, drawn at 0. None: nothing was subtracted.
    """

    title: str
    x_label: str
    y_label: str
    points: DataFrame
    looks: dict[str, Look]
    zero: str | None = None


@matplotlib.rc_context(STYLE)
def save(comparison: Comparison, charts: dict[str, list[Chart]]) -> None:
    """Write a PNG and an SVG file for the charts of each name, and for needles by depth."""
    figures = {name: panels(drawn) for name, drawn in charts.items()}
    for task in comparison.tasks:
        rows = [row for row in comparison.of_task(task) if tag_values(comparison.outcomes(row), "depth")]
        if rows:
            figures[f"depths_{task}"] = depths(comparison, rows)
    for name, figure in figures.items():
        figure.savefig(comparison.folder / f"{name}.png")
        figure.savefig(comparison.folder / f"{name}.svg", metadata={"Date": None})


def all_charts(comparison: Comparison) -> dict[str, list[Chart]]:
    """Return all charts by the name of the file that shows them."""
    charts = {"lead": lead_charts(comparison)}
    for task in comparison.tasks:
        charts[f"quality_{task}"] = quality_charts(comparison, task)
        charts[f"nats_{task}"] = quality_charts(comparison, task, "nats")
        kinds = dict.fromkeys(kind for row in comparison.of_task(task) for kind in part_kinds(comparison.outcomes(row)))
        for kind in kinds:
            charts[f"{kind}s_{task}"] = charts_by_part(comparison, task, kind)
    return {name: drawn for name, drawn in charts.items() if drawn}


def looks(comparison: Comparison) -> dict[str, Look]:
    """Return the look of each policy, by label."""
    counts, found = Counter[bool](), {}
    for label, gated in comparison.rows.drop_duplicates("label")[["label", "gated"]].itertuples(index=False):
        number = counts[gated]
        counts[gated] += 1
        found[label] = Look("gates" if gated else COLOURS[number % len(COLOURS)], [*MARKERS][number % len(MARKERS)])
    return found


def lead_charts(comparison: Comparison) -> list[Chart]:
    """Return nats over the full cache by kept share, for the first task that asks after eviction and the first text.

    Tasks with fewer than two kept shares are left out, and tasks that the model cannot do. Intervals are 95 %
    intervals of the paired difference. Without a result of the full cache the charts show the nats themselves.
    """
    charts = []
    for subject, is_subject in (("question after eviction", _asks_after), ("continuation", _continues)):
        for task in comparison.tasks:
            rows = [row for row in comparison.of_task(task) if row.n]
            shares = {row.kept for row in rows if row.evicts and is_subject(row)}
            if len(shares) >= MIN_SHARES and not comparison.uninformative(task):
                charts.append(_over_full(comparison, f"{subject}: {task}", rows))
                break
    return charts


def _asks_after(row: Row) -> bool:
    return bool(row.question == "after" and row.nats == row.nats)


def _continues(row: Row) -> bool:
    return bool(row.question is None and row.metric == "nats per token")


def _over_full(comparison: Comparison, title: str, rows: Sequence[Row]) -> Chart:
    full = next((row for row in rows if not row.evicts), None)
    tag = "nats" if any(_asks_after(row) for row in rows) else ""

    def measure(row: Row) -> tuple[float, float, float] | None:
        values = np.array(list(tag_values(comparison.outcomes(row), tag).values()))
        if row is full or not len(values):
            return None
        paired = None if full is None else comparison.paired(row, full, tag)
        return (values.mean(), *bootstrap(values)) if paired is None else (paired.difference, paired.low, paired.high)

    y_label = "nats" if full is None else "nats over the full cache"
    return _by_memory(comparison, title, y_label, rows, measure, None if full is None else full.label)


def quality_charts(comparison: Comparison, task: str, tag: str = "") -> list[Chart]:
    """Return the metric of a task, or the nats of its right answers, by kept share, with standard errors."""

    def measure(row: Row) -> tuple[float, float, float] | None:
        mean, error = (row.nats, row.nats_error) if tag else (row.mean, row.error)
        return None if np.isnan(mean) else (mean, mean - np.nan_to_num(error), mean + np.nan_to_num(error))

    rows = comparison.of_task(task)
    which = "higher" if rows[0].higher_is_better and not tag else "lower"
    metric = "nats per token" if tag else rows[0].metric
    title = f"{task}: nats of the right answer" if tag else task
    chart = _by_memory(comparison, title, f"{metric} ({which} is better)", rows, measure)
    return [] if chart.points.empty else [chart]


def _by_memory(
    comparison: Comparison,
    title: str,
    y_label: str,
    rows: Sequence[Row],
    measure: Callable[[Row], tuple[float, float, float] | None],
    zero: str | None = None,
) -> Chart:
    """Return a chart by kept share; if keys and values were stored in several types, by their bytes."""
    in_bytes = len({row.kv_bytes for row in rows if row.n and not row.evicts}) > 1
    sign = "+.4f" if zero is not None else ".4f"
    points = []
    for row in rows:
        if row.n and (measured := measure(row)) is not None:
            shares = sorted({other.kept for other in rows if other.label == row.label and other.n})
            x, (y, low, high) = (row.memory if in_bytes else row.kept), measured
            text = f"{row.name}: {y:{sign}} [{low:{sign}}, {high:{sign}}] at {percent(row.kept)} kept"
            legend = f"{shorten(row.label)} ({kept_shares_text(shares)})"
            points.append((row.label, legend, x, y, low, high, text, not row.evicts))
    x_label = MEMORY if in_bytes else KEPT
    return Chart(_titled(title, rows), x_label, y_label, _frame(points), looks(comparison), zero)


def charts_by_part(comparison: Comparison, task: str, kind: str) -> list[Chart]:
    """Return charts of a task by position or by numbered parts (turns), one for each budget.

    Policies without a budget are in each chart. Charts show differences to the baseline. If the baseline has no
    result, they show nats. Parts with names have no chart.
    """
    charts = []
    for budget in comparison.budgets or [""]:
        rows = [row for row in comparison.at(task, budget) if row.n]
        bases = [comparison.baseline_of(row) for row in rows]
        compared = any(base is not None for base in bases)
        points = []
        for row, base in zip(rows, bases, strict=True):
            if (compared and base is None) or not _numbered(part_values(comparison.outcomes(row), kind)):
                continue
            name = f"{row.name} ({percent(row.kept)})"
            sign = ".3f" if base is None else "+.3f"
            for x, (y, error) in part_means(comparison, row, base, kind).iterrows():
                error = np.nan_to_num(error)
                text = f"{name}: {y:{sign}} {'from' if kind == POSITION else kind} {x:,}"
                points.append((row.label, shorten(name), x, y, y - error, y + error, text, False))
        if points:
            y_label = f"nats a token over {comparison.baseline}" if compared else "nats a token"
            title = _titled(f"{task} at budget {budget}" if budget else task, rows)
            x_label = "position in the text (tokens)" if kind == POSITION else kind
            zero = comparison.baseline if compared else None
            charts.append(Chart(title, x_label, y_label, _frame(points), looks(comparison), zero))
    return charts


def _numbered(values: DataFrame) -> bool:
    return all(isinstance(column, int) for column in values.columns)


def _frame(points: Sequence[tuple[Any, ...]]) -> DataFrame:
    return DataFrame(points, columns=["label", "name", "x", "y", "low", "high", "text", "level"])


def _titled(title: str, rows: Sequence[Row]) -> str:
    return f"{title}, {max(row.n for row in rows)} samples"


def kept_shares_text(shares: Sequence[float]) -> str:
    """Return ascending kept shares as text: ``10, 25, 50 %``."""
    return f"{', '.join(dict.fromkeys(percent(share).removesuffix(' %') for share in shares))} %"


def shorten(name: str) -> str:
    """Return a name, without its middle if it is long (gates in a deep folder)."""
    return name if len(name) <= MAX_NAME else f"{name[:9]}…{name[10 - MAX_NAME :]}"


def panels(charts: Sequence[Chart]) -> Figure:
    """Draw charts beside each other, with one legend for all."""
    figure, grid = _grid(len(charts), 3, (4.2, 3.6), beside=2.6)
    handles: dict[str, Any] = {}
    for axes, chart in zip(grid, charts, strict=True):
        draw(axes, chart)
        axes.set_title(chart.title, fontsize=10)
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False)
    return figure


def draw(axes: Axes, chart: Chart) -> None:
    """Draw a chart; the id of each point is its text. The axes reach beyond the ends of all bars."""
    # over the gates' thicker line: both are visible if they coincide
    level: Any = {"linestyle": "--", "linewidth": 1, "alpha": 0.7, "zorder": 10}
    if chart.zero is not None:
        axes.axhline(0, color=THEME[chart.looks[chart.zero].colour], **level)
        axes.set_yscale("symlog", linthresh=SMALL, linscale=0.3)
    groups = chart.points.sort_values("x").groupby(["label", "name"], sort=False)
    order = [*chart.looks]
    for (label, name), points in sorted(groups, key=lambda group: order.index(group[0][0])):
        look, gated = chart.looks[label], chart.looks[label].colour == "gates"
        style: dict[str, Any] = {"color": THEME[look.colour], "zorder": 9 if gated else 2}
        if len(points) == 1 and points.level.all():
            axes.axhline(points.y.iloc[0], **style | level)
        axes.plot(points.x, points.y, linewidth=2.2 if gated else 1.2, **style)
        axes.vlines(points.x, points.low, points.high, alpha=0.45, **style)
        for number, point in enumerate(points.itertuples()):
            legend = "_" if number else name
            axes.plot(point.x, point.y, look.marker, markersize=5, label=legend, gid=TIP + point.text, **style)
    axes.margins(y=0.05)
    axes.set_xlim(left=0)
    if chart.zero is not None:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    share = PercentFormatter(1, decimals=0, symbol=" %")
    axes.xaxis.set_major_formatter(share if chart.x_label in (KEPT, MEMORY) else StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def depths(comparison: Comparison, rows: Sequence[Row]) -> Figure:
    """Draw the mean score by length and depth of the needle, a panel for each policy."""
    figure, grid = _grid(len(rows), 4, (2.6, 2.0))
    for axes, row in zip(grid, rows, strict=True):
        tags = DataFrame([{**outcome.tags, "score": outcome.score} for outcome in comparison.outcomes(row)])
        means = tags.pivot_table(index="depth", columns="length", values="score")
        axes.imshow(means, aspect="auto", interpolation="nearest", vmin=0, vmax=1, cmap="viridis")
        axes.set_xticks(range(means.shape[1]), list(map(str, means.columns)), fontsize=7)
        axes.set_yticks(range(means.shape[0]), [f"{depth:g}" for depth in means.index], fontsize=7)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set_title(f"{shorten(f'{row.name} ({percent(row.kept)})')}: {row.mean:.2f}", fontsize=8)
    figure.suptitle(f"{rows[0].task}: {rows[0].metric} by length (tokens) and depth of the needle", fontsize=11)
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


@matplotlib.rc_context(STYLE)
def svg(chart: Chart) -> Markup:
    """Draw a chart for the page: without ids, in the page's colours, and with its contents as its title."""
    figure, file = Figure(figsize=(3.8, 2.5), layout="constrained"), io.StringIO()
    draw(figure.subplots(), chart)
    figure.patch.set_visible(False)
    text = f"{chart.title}: {chart.y_label} by {chart.x_label}. {'; '.join(chart.points.text)}"
    with matplotlib.rc_context({"svg.hashsalt": text}):  # of ids, which no other chart may have
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    element = re.search(r'(?s)<svg[^>]* viewBox="([^"]*)"[^>]*>(.*</svg>)', file.getvalue())
    assert element is not None
    body = re.sub(r"(?s)<defs>\s*<style.*?</defs>", "", element[2])
    body = re.sub(f'<g id="{TIP}([^"]*)">', r"<g><title>\1</title>", body)
    body = re.sub(r' id="[\w.]+_\d+"|font-family: [^;]*; ', "", body)
    for name, hexadecimal in THEME.items():
        body = body.replace(hexadecimal, f"var(--{name})")
    start = Markup('<svg class="chart" role="img" viewBox="{}"><title>{}</title>').format(element[1], text)
    return start + Markup(body)  # nosec B704  # matplotlib escapes names
