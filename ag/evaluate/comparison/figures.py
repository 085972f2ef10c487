"""The figures of a comparison: curves by memory, by position and by part, as PNG and SVG files and in the page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter
from pandas import DataFrame
from pandas.api.types import is_integer_dtype

from ag.evaluate.comparison.folder import tag_values
from ag.evaluate.comparison.rows import Comparison, Row, percent
from ag.evaluate.comparison.statistics import interval_text
from ag.evaluate.comparison.tables import part_means
from ag.evaluate.tasks.base import POSITION
from ag.files import file_names
from ag.gates.figures import DPI

MIN_SHARES = 2  # kept shares that make a curve
KEPT = "kept share of the prompt"
MEMORY = "KV bytes of the full cache's"
HELD = "tokens held by a KV head"
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

    The columns of ``points`` are ``label`` (policy), ``name`` (in the legend, with the kept shares), ``x``, ``y``,
    ``low`` and ``high`` (ends of the interval or of the standard error), ``text``, and ``level`` (whether a single
    point is drawn as a level through the chart: the full cache).
    """

    title: str  # the task, and its number of samples
    x_label: str
    y_label: str
    points: DataFrame
    looks: dict[str, Look]  # of each policy; gates are drawn last
    zero: str = ""  # label of the policy that is subtracted, drawn at 0; empty: nothing was subtracted


@matplotlib.rc_context(STYLE)
def save(comparison: Comparison, charts: dict[str, list[Chart]]) -> None:
    """Write a PNG and an SVG file for the charts of each name, and for needles by depth."""
    figures = {name: panels(drawn) for name, drawn in charts.items()}
    for task in comparison.tasks:
        rows = [row for row in comparison.of_task(task) if tag_values(comparison.outcomes(row), "depth")]
        if rows:
            figures[f"depths_{task}"] = depths(comparison, rows)
    for name, figure in zip(file_names(figures), figures.values(), strict=True):
        figure.savefig(comparison.folder / f"{name}.png")
        figure.set_layout_engine("none")  # it stays as it was laid out, which takes most of the time
        figure.savefig(comparison.folder / f"{name}.svg", metadata={"Date": None})


def all_charts(comparison: Comparison) -> dict[str, list[Chart]]:
    """Return all charts by the name of the file that shows them."""
    charts = {"lead": lead_charts(comparison)}
    for task in comparison.tasks:
        charts[f"quality_{task}"] = quality_charts(comparison, task)
        charts[f"nats_{task}"] = quality_charts(comparison, task, "nats")
        for kind in comparison.part_kinds(task):
            charts[f"{kind}s_{task}"] = charts_by_part(comparison, task, kind)
    return {name: drawn for name, drawn in charts.items() if drawn}


def looks(comparison: Comparison) -> dict[str, Look]:
    """Return the look of each policy, by label."""
    policies = comparison.rows.drop_duplicates("label")
    numbers = policies.groupby("gated").cumcount()  # within gates, and within other policies
    return {
        label: Look("gates" if gated else COLOURS[number % len(COLOURS)], [*MARKERS][number % len(MARKERS)])
        for label, gated, number in zip(policies.label, policies.gated, numbers, strict=True)
    }


def lead_charts(comparison: Comparison) -> list[Chart]:
    """Return nats over the full cache by kept share, for the first task that asks after eviction and the first text.

    Tasks with fewer than two kept shares are left out, and tasks that the model cannot do. Intervals are 95 %
    intervals of the paired difference. If the baseline is no full cache, the charts show nats with standard errors.
    """
    rows, charts = comparison.rows, []
    asks_after = (rows.question == "after") & rows.nats.notna()
    continues = rows.question.isna() & (rows.metric == "nats per token")
    for subject, chosen, tag in (("question after eviction", asks_after, "nats"), ("continuation", continues, "mean")):
        shares = rows[chosen & rows.evicts & (rows.n > 0)].groupby("task", sort=False).kept.nunique()
        tasks = [task for task in shares.index[shares >= MIN_SHARES] if not comparison.uninformative(task)]
        for task in tasks[:1]:
            full = rows[(rows.task == task) & (rows.label == comparison.baseline) & ~rows.evicts]
            label, zero = ("nats", "") if full.empty else ("nats over the full cache", comparison.baseline)
            charts.append(_by_memory(comparison, task, f"{subject}: {task}", label, tag, zero))
    return charts


def quality_charts(comparison: Comparison, task: str, tag: str = "mean") -> list[Chart]:
    """Return the metric of a task, or the nats of its right answers, by kept share, with standard errors."""
    row = comparison.of_task(task)[0]
    title, name, higher = task, row.metric, row.higher_is_better
    if tag == "nats":
        title, name, higher = f"{task}: nats of the right answer", "nats per token", False
    label = f"{name} ({'higher' if higher else 'lower'} is better)"
    chart = _by_memory(comparison, task, title, label, tag)
    return [] if chart.points.empty else [chart]


def _by_memory(comparison: Comparison, task: str, title: str, label: str, tag: str, zero: str = "") -> Chart:
    """Return a chart of a column (``mean``, ``nats``) by kept share; by bytes if these were stored in several types.

    Solutions are shown by the largest number of tokens that a KV head held, as the mean over heads and solutions. If
    ``zero`` names a policy, the chart shows differences to this, with their intervals.
    """
    rows = comparison.rows[(comparison.rows.task == task) & (comparison.rows.n > 0)]
    in_bytes = rows[~rows.evicts].kv_bytes.nunique() > 1
    if zero:
        column = "nats_difference" if tag == "nats" else "difference"
        y, low, high = rows[column], rows[f"{column}_low"], rows[f"{column}_high"]
    else:
        error = rows.nats_error if tag == "nats" else rows.error  # NaN for a single sample
        y, low, high = rows[tag], rows[tag] - error, rows[tag] + error
    shares = rows.sort_values("kept").groupby("label").kept.agg(kept_shares_text)
    names = [f"{shorten(name)} ({shares[name]})" for name in rows.label]
    held = [tag_values(comparison.outcomes(row), "most_held").values() for row in rows.itertuples(index=False)]
    if all(held):
        x, x_label = [fmean(numbers) for numbers in held], HELD
    else:
        x, x_label = (rows.memory, MEMORY) if in_bytes else (rows.kept, KEPT)
    sign = "+" if zero else ""
    points = rows[["label"]].assign(name=names, x=x, y=y, low=low, high=high, level=~rows.evicts)
    points["text"] = [
        f"{row.name}: {point.y:{sign}.4f}{interval_text(point.low, point.high, f'{sign}.4f')} at {percent(row.kept)} "
        "kept"
        for row, point in zip(rows.itertuples(index=False), points.itertuples(index=False), strict=True)
    ]
    title = f"{title}, {rows.n.max()} samples"
    return Chart(title, x_label, label, points.dropna(subset="y"), looks(comparison), zero)


def charts_by_part(comparison: Comparison, task: str, kind: str) -> list[Chart]:
    """Return charts of a task by position or by numbered parts (turns), one for each budget.

    Policies without a budget are in each chart. Charts show differences to the baseline. If the baseline has no
    result, they show nats. Parts with names have no chart.
    """
    charts = []
    for budget in comparison.budgets(task):
        rows = [row for row in comparison.at(task, budget) if row.n]
        bases = [comparison.baseline_of(row) for row in rows]
        compared = any(base is not None for base in bases)
        points = []
        for row, base in zip(rows, bases, strict=True):
            means = part_means(comparison, row, base, kind)
            if (compared and base is None) or not is_integer_dtype(means.index):
                continue
            name, sign = f"{row.name} ({percent(row.kept)})", ".3f" if base is None else "+.3f"
            for x, (y, error) in means.fillna({"error": 0}).iterrows():
                text = f"{name}: {y:{sign}} {'from' if kind == POSITION else kind} {x:,}"
                points.append((row.label, shorten(name), x, y, y - error, y + error, False, text))
        if points:
            title = f"{task}{f' at budget {budget}' if budget else ''}, {max(row.n for row in rows)} samples"
            x_label = "position in the text (tokens)" if kind == POSITION else kind
            zero = comparison.baseline if compared else ""
            y_label = f"nats a token over {zero}" if zero else "nats a token"
            frame = DataFrame(points, columns=["label", "name", "x", "y", "low", "high", "level", "text"])
            charts.append(Chart(title, x_label, y_label, frame, looks(comparison), zero))
    return charts


def kept_shares_text(shares: Iterable[float]) -> str:
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
    if chart.zero:
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
    if chart.zero:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    share = PercentFormatter(1, decimals=0, symbol=" %")
    axes.xaxis.set_major_formatter(share if chart.x_label in (KEPT, MEMORY) else StrMethodFormatter("{x:,.0f}"))
    axes.grid(axis="y")
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label, axisbelow=True)


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
