"""What a part's rows say: a page and a picture beside them, and tables of several cards in the documentation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ag.bench.write import skipped
from ag.errors import UserError
from scripts.gpu.goals import DENSE
from scripts.gpu.run import ROWS, Row, number, outcome, read, verdict

FILE, PICTURE = "summary.md", "plot.png"
BEGIN, END = "<!-- gpu -->", "<!-- end gpu -->"
WHAT = {
    "kernels": ("kernel", "size", "ms", "timed by", "GB/s", "TFLOP/s", "bound by", "of bound", *DENSE),
    "decode": ("context", "batch", "contestant", "kept", "ms/token", "x full", "x transformers", "of roofline"),
    "prefill": ("context", "batch", "contestant", "kept", "seconds", "over full", "over transformers"),
    "memory": ("context", "batch", "contestant", "KV bytes", "KV of full", "peak over model", "peak of full"),
    "train": ("context", "batch", "contestant", "seconds", "time over lora", "peak bytes", "peak over lora"),
}
FIT = ("tokens/s", "seconds a step", "share of gates", "peak bytes", "peak over plan", "hours on four cards", "samples")
#: column that a picture shows of each kind of result, and the columns that name its bars
SHOWN = {
    "kernels": ("of bound", ("kernel",)),
    "decode": ("x transformers", ("contestant", "context", "batch")),
    "prefill": ("over transformers", ("contestant", "context")),
    "memory": ("peak of full", ("contestant", "context")),
    "train": ("time over lora", ("contestant", "context")),
}


def write(folder: Path) -> None:
    """Write a part's page and picture from its rows."""
    rows = list(read(folder).values())
    (folder / FILE).write_text(page(rows))
    plot(rows).savefig(folder / PICTURE)


def page(rows: Sequence[Row]) -> str:
    """Return the summary of a part: the machine, goals, lines, tables and the ends of what failed."""
    first = rows[0]
    about = ", ".join(f"{name} {value}" for name, value in first["versions"].items())
    memory = f"{first['gib']:.0f} GiB, driver {first['driver']}; " if first["gib"] else ""
    parts = [f"# {first['part']}: {first['card']}", f"{memory}{about}", _goals([rows]), "## Lines", _lines(rows)]
    for row in rows:
        if tables := _tables(row):
            parts += [f"## {row['line']}", f"`{row['command']}` (commit {row['commit']}, {row['date']})", *tables]
    for row in rows:
        if row.get("tail"):
            parts += [f"## {row['line']}: {row['why']}", f"`{row['command']}`", f"```\n{row['tail'].strip()}\n```"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _lines(rows: Sequence[Row]) -> str:
    cells = []
    for row in rows:
        tests = row.get("result", {}).get("tests")
        said = [outcome(tests)] if tests else []
        said += [row["why"]] if "why" in row else []
        said += [f"smaller: {'; '.join(row['smaller'])}"] if "smaller" in row else []
        cells.append([row["line"], row["status"], number(row.get("seconds")), row["commit"], "; ".join(said)])
    return table(["line", "status", "s", "commit", ""], cells)


def _goals(cards: Sequence[Sequence[Row]]) -> str:
    """Return a table of goals, with a column for each card."""
    heads = [f"{rows[0]['card']} ({rows[0]['commit']})" for rows in cards]
    names = dict.fromkeys(
        (row["line"], goal["goal"], goal["kind"], goal["bar"])
        for rows in cards
        for row in rows
        for goal in row.get("goals", [])
    )
    cells = []
    for line, name, kind, bar in names:
        mine = [_found(rows, line, name, kind) for rows in cards]
        cells.append([line, name, f"{kind} {number(bar)}", *mine])
    return table(["line", "goal", "bar", *heads], cells) if cells else ""


def _found(rows: Sequence[Row], line: str, name: str, kind: str) -> str:
    """Return what a card measured of a goal, and whether it was met."""
    for row in (row for row in rows if row["line"] == line):
        for goal in row.get("goals", []):
            if (goal["goal"], goal["kind"]) == (name, kind):
                smaller = f"; at {', '.join(row['shape'].values())}" if "smaller" in row else ""
                return f"{number(goal['measured'])} ({verdict(goal)}{smaller})"
        return str(row.get("why", row["status"]))
    return ""


def _tables(row: Row) -> list[str]:
    """Return the tables of a line's results."""
    found = []
    for name, result in row.get("result", {}).items():
        if name in WHAT and "rows" in result:
            columns = [column for column in WHAT[name] if any(column in one for one in result["rows"])]
            found.append(table(columns, [[_cell(c, one.get(c)) for c in columns] for one in result["rows"]]))
            found += skipped(result)
            if name == "kernels":
                rates = (f"{key} {number(result[key])}" for key in ("copy GB/s", "matmul TFLOP/s"))
                found.append("Measured in the same run: " + ", ".join(rates) + ".")
        elif name == "fit":
            found.append(table(["", ""], [[key, _cell(key, result[key])] for key in FIT if key in result]))
        elif name == "scores":
            columns = ["kept", "losses", "kv_bytes"]
            cells = [
                [who, number(one["kept"]), number(_mean(one["losses"])), number(one["kv_bytes"])]
                for who, one in result.items()
            ]
            found.append(table(["policy", *columns], cells))
    return found


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1%}" if name == "kept" else number(value)
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; a bar within a cell is written out."""
    lines = [heads, [":--"] * len(heads), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in line) + " |" for line in lines
    )


def plot(rows: Sequence[Row]) -> Figure:
    """Draw one panel a kind of result: tests by outcome, bars of what was measured, losses of training."""
    panels = [(row, name) for row in rows for name in row.get("result", {}) if name in SHOWN or name == "fit"]
    tests = [row for row in rows if "tests" in row.get("result", {})]
    count = len(panels) + bool(tests) or 1
    wide = min(3, count)
    figure = Figure(figsize=(5 * wide, 3.4 * -(-count // wide)), dpi=100, layout="constrained")
    axes = list(figure.subplots(-(-count // wide), wide, squeeze=False).flat)
    for axis in axes[count - (not panels and not tests) :]:
        axis.set_axis_off()
    if tests:
        _draw_tests(axes.pop(0), tests)
    for axis, (row, name) in zip(axes, panels, strict=False):
        result = row["result"][name]
        if name == "fit":
            axis.plot(result["steps"], result["losses"], "o-", ms=3)
            axis.set_xlabel("step")
            axis.set_title(f"{row['line']}: loss", fontsize=9)
        else:
            _draw(axis, result["rows"], *SHOWN[name])
            axis.set_title(f"{row['line']}: {SHOWN[name][0]}", fontsize=9)
    return figure


def _draw(axis: Axes, rows: list[Row], value: str, named: tuple[str, ...]) -> None:
    labels = [" ".join(_cell(name, row[name]) for name in named) for row in rows]
    axis.barh(range(len(rows)), [row[value] for row in rows])
    axis.set_yticks(range(len(rows)), labels, fontsize=6)
    axis.axvline(1, color="0.5", lw=0.8)
    axis.invert_yaxis()


def _draw_tests(axis: Axes, rows: list[Row]) -> None:
    left = [0] * len(rows)
    colors = {"passed": "tab:green", "failures": "tab:red", "errors": "tab:purple", "skipped": "0.7"}
    for name, color in colors.items():
        counts = [row["result"]["tests"][name] for row in rows]
        axis.barh(range(len(rows)), counts, left=left, color=color, label=name)
        left = [a + b for a, b in zip(left, counts, strict=True)]
    axis.set_yticks(range(len(rows)), [row["line"] for row in rows], fontsize=6)
    axis.invert_yaxis()
    axis.legend(fontsize=6)


# --- several cards


def report(folders: Sequence[Path]) -> tuple[str, dict[str, Figure]]:
    """Fold the folders of several cards and commits.

    Args:
        folders: each an OUT of ``gpu.sh``, with a folder for every part that was run.

    Returns:
        Markdown, and a picture for each card, by file name.

    Raises:
        UserError: for a folder without rows.
    """
    cards: list[list[Row]] = []
    for folder in folders:
        rows = [row for part in sorted(folder.glob(f"*/{ROWS}")) for row in read(part.parent).values()]
        if not rows:
            raise UserError(f"{folder}: expected a folder of scripts/gpu.sh, with PART/{ROWS}.")
        cards.append(rows)
    parts, pictures = [_goals(cards)], {}
    for rows in cards:
        first = rows[0]
        name = "".join(c if c.isalnum() else "_" for c in f"gpu_{first['card']}_{first['commit']}".lower()) + ".png"
        pictures[name] = plot(rows)
        kept = ("torch", "triton", "transformers")
        about = ", ".join(f"{package} {first['versions'][package]}" for package in kept)
        parts += [
            f"### {first['card']}, commit {first['commit']}",
            f"Driver {first['driver']}, {about}, {first['date']}.",
        ]
        parts += [_lines(rows), f"![{first['card']}](figures/{name})"]
        for row in rows:
            if tables := _tables(row):
                parts += [f"**{row['part']}: {row['line']}**", *tables]
    return "\n\n".join(part for part in parts if part), pictures


def main(words: Sequence[str]) -> int:
    """``python -m ag.bench report OUT... [--to docs/performance.md]``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ag.bench report", description="Fold the results of several cards.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="OUT", help="folders that scripts/gpu.sh wrote")
    parser.add_argument(
        "--to", type=Path, default=Path("docs/performance.md"), help="page with the markers (%(default)s)"
    )
    options = parser.parse_args(words)
    try:
        text, pictures = report(options.folders)
        put(options.to, text)
    except UserError as error:
        print(f"ag.bench: error: {error}", file=sys.stderr)
        return 2
    (options.to.parent / "figures").mkdir(exist_ok=True)
    for name, picture in pictures.items():
        picture.savefig(options.to.parent / "figures" / name, metadata={"Software": None})
    print(f"written: {options.to}")
    return 0


def put(page_file: Path, text: str) -> None:
    """Replace what stands between a page's markers.

    Raises:
        UserError: for a page that is not there or has no markers.
    """
    old = page_file.read_text() if page_file.is_file() else ""
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"--to {page_file}: expected a page with a line {BEGIN} and a line {END} after it.")
    page_file.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
