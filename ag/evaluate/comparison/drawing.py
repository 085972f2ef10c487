"""The charts of a comparison drawn by matplotlib: as SVG for the page, which colours them, and as PNG files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.markers import MarkerStyle
from matplotlib.patches import PathPatch
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray

from ag.evaluate.comparison import charts
from ag.evaluate.comparison.charts import Chart, Look, short
from ag.evaluate.comparison.findings import Comparison, Wins
from ag.evaluate.comparison.result import Result
from ag.evaluate.comparison.shares import shown
from ag.gates.figures import DPI

FILES = Path(__file__).parent / "page_files"
LIGHT, _, _ = (FILES / "page.css").read_text(encoding="utf-8").partition("@media")
#: Hex colours of charts by their names in the style sheet, as the page has them in the light, and files always.
THEME: dict[str, str] = dict(re.findall(r"--(soft|line|gates|c\d): (#\w{6})", LIGHT))
COLOURS = tuple(colour for name, colour in THEME.items() if re.fullmatch(r"c\d", name))
MARKERS = "osD^vP*"  # as many as share no factor with the colours
SMALL = 0.01  # nats, below which the scale of differences is linear
PAGE = (3.8, 2.5)  # inches; a page scales them
TIP = "point: "  # begins the id of a point, which becomes its title
STYLE: Any = {
    "axes.edgecolor": THEME["soft"],
    "axes.facecolor": "none",
    "axes.labelcolor": THEME["soft"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 8.0,
    "grid.color": THEME["line"],
    "svg.fonttype": "none",
    "text.color": THEME["soft"],
    "text.parse_math": False,  # a $ in a name is one
    "xtick.color": THEME["soft"],
    "ytick.color": THEME["soft"],
}


@matplotlib.rc_context(STYLE)
def save(comparison: Comparison) -> None:
    """Write all plots there are results for as PNG files."""
    for name, figure in draw(comparison):
        figure.savefig(comparison.folder / f"{name}.png")


def draw(comparison: Comparison) -> Iterator[tuple[str, Figure]]:
    """Return all plots, each with its file's name without the ending."""
    for name, drawn in charts.every(comparison).items():
        yield name, panels(drawn)
    for task in comparison.tasks:
        results = [result for result in comparison.of_task(task) if result.outcomes]
        if any("depth" in outcome.tags for result in results for outcome in result.outcomes):
            yield f"depths_{task}", depths(task, results)
    wins = [(budget, comparison.wins(budget)) for budget in comparison.budgets]
    if any(len(matrix.names) > 1 for _, matrix in wins):
        yield "wins", win_matrix(wins)
    names, shares = comparison.layers()
    if names:
        yield "layers", kept_by_layer(names, shares)


def panels(drawn: Sequence[Chart]) -> Figure:
    """Draw charts beside each other, with one legend for all."""
    figure, grid = _grid(len(drawn), 3, (4.2, 3.6), beside=2.6)
    handles: dict[str, Any] = {}
    for axes, chart in zip(grid, drawn, strict=True):
        lines_over(axes, chart)
        axes.set_title(chart.title, fontsize=10)
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False)
    return figure


def lines_over(axes: Axes, chart: Chart) -> None:
    """Draw a chart; each of its points has what it says as its id."""
    # over the gates' thicker line, so that both are seen where these are as good
    level: Any = {"linestyle": "--", "linewidth": 1, "alpha": 0.7, "zorder": 10}
    if chart.zero is not None:
        axes.axhline(0, color=colour(chart.zero), **level)
        axes.set_yscale("symlog", linthresh=SMALL, linscale=0.3)
    for line in chart.lines:
        style: dict[str, Any] = {"color": colour(line.look), "zorder": 9 if line.look.gated else 2}
        if line.level and len(line.points) == 1:
            axes.axhline(line.points[0].y, **style | level)
        xs, ys, low, high, _ = zip(*line.points, strict=True)
        axes.plot(xs, ys, linewidth=2.2 if line.look.gated else 1.2, **style)
        axes.vlines(xs, low, high, alpha=0.45, **style)
        for number, point in enumerate(line.points):
            axes.plot(
                point.x,
                point.y,
                MARKERS[line.look.number % len(MARKERS)],
                markersize=5,
                label="_" if number else line.name,
                gid=TIP + point.text,
                **style,
            )
    axes.set_xlim(left=0)
    if chart.zero is not None:
        axes.set_ylim(bottom=min([-SMALL / 2, *(point.low for line in chart.lines for point in line.points)]))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    percent = PercentFormatter(1, decimals=0, symbol=" %")
    axes.xaxis.set_major_formatter(percent if chart.over_shares else StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def colour(look: Look) -> str:
    """Return the colour of a policy."""
    return THEME["gates"] if look.gated else COLOURS[look.number % len(COLOURS)]


@matplotlib.rc_context(STYLE)
def svg(chart: Chart) -> Markup:
    """Draw a chart for the page, with its colours by name, its text as text, and all that it shows as its title."""
    figure = Figure(figsize=PAGE, layout="constrained")
    lines_over(figure.subplots(), chart)
    return _inline(figure, Markup('class="chart" role="img"'), Markup("<title>{}</title>").format(chart.text))


def legend_mark(look: Look) -> Markup:
    """Draw the mark of a policy alone, as a path without an id, since a page has several legends."""
    figure = Figure(figsize=(0.2, 0.2))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.7, 0.7), ylim=(-0.7, 0.7))
    axes.set_axis_off()
    style = MarkerStyle(MARKERS[look.number % len(MARKERS)])
    path = style.get_path().transformed(style.get_transform())
    axes.add_patch(PathPatch(path, color=colour(look), clip_on=False))
    return _inline(figure, Markup('class="mark" aria-hidden="true"'))


def _inline(figure: Figure, attributes: Markup, title: str = "") -> Markup:
    """Return a figure as an element of the page: no style sheet or id of its own, colours of the page."""
    file = io.StringIO()
    figure.patch.set_visible(False)
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": str(title)}):  # of ids, which no other chart may have
        figure.savefig(file, format="svg", metadata=nothing)
    found = re.search(r'(?s)<svg[^>]* viewBox="([^"]*)"[^>]*>(.*</svg>)', file.getvalue())
    assert found is not None
    body = re.sub(r"(?s)<defs>\s*<style.*?</defs>", "", found[2])
    body = re.sub(f'<g id="{TIP}([^"]*)">', r"<g><title>\1</title>", body)
    body = re.sub(r' id="[\w.]+_\d+"|font-family: [^;]*; ', "", body)
    for name, hexadecimal in THEME.items():
        body = body.replace(hexadecimal, f"var(--{name})")
    start = Markup('<svg {} viewBox="{}">{}').format(attributes, found[1], title)
    return start + Markup(body)  # nosec B704  # matplotlib escapes names


def win_matrix(drawn: Sequence[tuple[str, Wins]]) -> Figure:
    """Draw in how many tasks the policy of a row is better than that of a column, for each budget."""
    size = 2.4 + 0.5 * max(len(wins.names) for _, wins in drawn)
    figure, grid = _grid(len(drawn), len(drawn), (size + 1.2, size))
    for axes, (budget, wins) in zip(grid, drawn, strict=True):
        names = [short(name) for name in wins.names]
        _heat(axes, wins.share, names, names, cmap="PuOr", vmin=-0.5, vmax=1.5)
        axes.tick_params("x", rotation=45)
        for (row, column), share in np.ndenumerate(wins.share):
            if row != column and wins.tasks[row, column]:
                text = f"{share * wins.tasks[row, column]:g}\n({wins.certain[row, column]})"
                axes.text(column, row, text, ha="center", va="center", color="black", fontsize=7)
        axes.set_title(f"budget {budget}", fontsize=10)
    figure.suptitle(f"Tasks of {drawn[0][1].tasks.max()} won by the row (with p < 0.05)", fontsize=11)
    return figure


def kept_by_layer(names: Sequence[str], shares: NDArray[np.float64]) -> Figure:
    """Draw the share that each layer kept of the viewed prompts, ``[P, L]``."""
    layers = shares.shape[1]
    figure, [axes] = _grid(1, 1, (float(np.clip(3.2 + 0.25 * layers, 5, 14)), 1.6 + 0.28 * len(names)))
    image = _heat(axes, shares, range(layers), [short(name) for name in names], cmap="YlGnBu")
    axes.xaxis.set_major_locator(MaxNLocator(32, integer=True))
    axes.set_xlabel("layer")
    axes.set_title("Kept share by layer", fontsize=11)
    bar = figure.colorbar(image, ax=axes, format=PercentFormatter(1, decimals=0), pad=0.02)
    bar.outline.set_visible(False)
    return figure


def depths(task: str, results: Sequence[Result]) -> Figure:
    """Draw the mean score by length and depth of the needle, a panel for each policy."""
    figure, grid = _grid(len(results), 4, (2.6, 2.0))
    for axes, result in zip(grid, results, strict=True):
        scores: dict[tuple[Any, Any], list[float]] = {}
        for outcome in result.outcomes:
            if "depth" in outcome.tags and "length" in outcome.tags:
                scores.setdefault((outcome.tags["depth"], outcome.tags["length"]), []).append(outcome.score)
        depths, lengths = (sorted({place[which] for place in scores}) for which in (0, 1))
        means = [[np.mean(scores.get((depth, length), np.nan)) for length in lengths] for depth in depths]
        _heat(axes, means, lengths, [f"{depth:g}" for depth in depths], cmap="viridis")
        axes.set_title(f"{short(shown(result))}: {result.summary.mean:.2f}", fontsize=8)
    figure.suptitle(f"{task}: {results[0].summary.metric} by length (tokens) and depth of the needle", fontsize=11)
    return figure


def _heat(axes: Axes, values: Any, columns: Sequence[Any], rows: Sequence[str], **colours: Any) -> AxesImage:
    """Draw numbers as colours, with names below and on the left."""
    image = axes.imshow(values, aspect="auto", interpolation="nearest", **{"vmin": 0, "vmax": 1} | colours)
    axes.set_xticks(range(len(columns)), list(map(str, columns)), fontsize=7)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image


def _grid(number: int, columns: int, size: tuple[float, float], beside: float = 0.0) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many axes of a size in inches, and room beside them."""
    columns = min(columns, number)
    rows = -(-number // columns)
    figure = Figure((beside + columns * size[0], rows * size[1]), dpi=DPI, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[number:]:
        axes.set_visible(False)
    return figure, list(grid[:number])
