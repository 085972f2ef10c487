"""Line charts as SVG for a page: they take its colours, and their text is text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

WIDTH, HEIGHT = 380, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 12, 40
SHAPES = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",  # circle
    "M-3.5,-3.5h7v7h-7z",  # square
    "M0,-5L5,0L0,5L-5,0z",  # diamond
    "M0,-5L4.5,3.5h-9z",  # triangle up
    "M0,5L4.5,-3.5h-9z",  # triangle down
    "M-1.5,-5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",  # plus
)


@dataclass(frozen=True)
class Point:
    """A point: place, standard error (or the ends of an interval in its place), and what it is, in words."""

    x: float
    y: float
    error: float
    text: str
    interval: tuple[float, float] | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """Lower and upper end of what is drawn about the point."""
        return self.interval or (self.y - self.error, self.y + self.error)


@dataclass(frozen=True)
class Line:
    """A line, whose number chooses colour and shape; gates share one colour, and are drawn over all others.

    That of the full cache is drawn as a level to hold the others against.
    """

    number: int
    name: str
    points: Sequence[Point]
    gated: bool = False
    full: bool = False

    @property
    def colour(self) -> str:
        """Its class."""
        return "gates" if self.gated else f"c{self.number % 8}"


def mark(line: Line) -> Markup:
    """Return the mark of a line, around the origin."""
    return Markup('<path class="mark {}" d="{}"/>').format(line.colour, SHAPES[line.number % len(SHAPES)])


def chart(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], *, shares: bool = True, zero: str = ""
) -> Markup:
    """Draw lines over shares, or over numbers from 0 on; the title says in words what there is to see.

    ``zero`` is the colour of a level at 0, which is then in sight.
    """
    points = [point for line in lines for point in line.points]
    low = min(point.ends[0] for point in points)
    high = max(point.ends[1] for point in points)
    low, high = (min(low, 0.0), max(high, 0.0)) if zero else (low, high)
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - pad, high + pad
    right = max(point.x for point in points) * 1.03 or 1.0

    def at(x: float, y: float) -> tuple[str, str]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / right
        down = TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low)
        return f"{across:.1f}", f"{down:.1f}"

    parts = [Markup('<svg class="chart" viewBox="0 0 {} {}" role="img"><title>{}</title>').format(WIDTH, HEIGHT, title)]
    for tick in MaxNLocator(5).tick_values(low, high):
        if low <= tick <= high:
            (left, down), (end, _) = at(0, tick), at(right, tick)
            parts.append(Markup('<path class="grid" d="M{},{}H{}"/>').format(left, down, end))
            parts.append(Markup('<text class="end" x="{}" y="{}" dy="4">{:.4g}</text>').format(LEFT - 6, down, tick))
    for tick in MaxNLocator(5).tick_values(0, right):
        if 0 <= tick <= right:
            across, _ = at(tick, low)
            text = Markup('<text class="middle" x="{}" y="{}">{}</text>')
            parts.append(text.format(across, HEIGHT - BOTTOM + 16, f"{100 * tick:.0f} %" if shares else f"{tick:,.0f}"))
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(Markup('<text class="middle" x="{}" y="{}">{}</text>').format(middle, HEIGHT - 6, x_label))
    parts.append(
        Markup('<text class="middle" transform="translate(11 {}) rotate(-90)">{}</text>').format(
            TOP + (HEIGHT - TOP - BOTTOM) / 2, y_label
        )
    )
    if zero:
        (left, y), (end, _) = at(0, 0), at(right, 0)
        parts.append(Markup('<path class="line level {}" d="M{},{}H{}"/>').format(zero, left, y, end))
    for line in sorted(lines, key=lambda line: line.gated):
        colour = line.colour
        if line.full and len(line.points) == 1:
            (left, y), (end, _) = at(0, line.points[0].y), at(right, line.points[0].y)
            parts.append(Markup('<path class="line level {}" d="M{},{}H{}"/>').format(colour, left, y, end))
        path = "L".join(",".join(at(point.x, point.y)) for point in line.points)
        parts.append(Markup('<path class="line {}" d="M{}"/>').format(colour, path))
        for point in line.points:
            (x, bottom), (_, top) = (at(point.x, end) for end in point.ends)
            _, y = at(point.x, point.y)
            parts.append(Markup('<path class="line error {}" d="M{},{}V{}"/>').format(colour, x, top, bottom))
            parts.append(
                Markup('<g transform="translate({} {})"><title>{}</title>{}</g>').format(x, y, point.text, mark(line))
            )
    return Markup("").join([*parts, Markup("</svg>")])
