"""A comparison as ``table.md``, plots, ``report.html`` and a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from ag.evaluate.comparison import plots, positions
from ag.evaluate.comparison.findings import Comparison
from ag.evaluate.comparison.page import render


def write(comparison: Comparison) -> None:
    """Write ``table.md``, the plots and ``report.html``."""
    folder = comparison.folder
    (folder / "table.md").write_text(markdown(comparison), encoding="utf-8")
    for name, figure in plots.draw(comparison):
        figure.savefig(folder / f"{name}.png")
    (folder / "report.html").write_text(render(comparison), encoding="utf-8")


def markdown(comparison: Comparison) -> str:
    """Return the comparison as Markdown: the leaderboard, then a table for each task."""
    head = ["policy", *comparison.tasks, *(f"average {metric}" for metric in comparison.averaged)]
    lines = []
    for name, rows, averages in comparison.leaders():
        scores = ["" if row is None else "none" if row.mean is None else f"{row.mean:.4f}" for row in rows]
        lines.append([name, *scores, *("none" if mean is None else f"{mean:.4f}" for mean in averages)])
    parts = [_markdown_table(head, lines, 1), *(f"- {name}: `{one}`" for name, one in comparison.meanings.items())]
    parts += [""] if comparison.meanings else []
    for task in comparison.tasks:
        entries = comparison.of_task(task)
        row = entries[0].row
        which = "higher" if row.higher_is_better else "lower"
        columns = comparison.columns(task)
        head = [{"score": row.metric, "difference": f"against {comparison.baseline}"}.get(c, c) for c in columns]
        parts.append(f"## {task}\n\n{row.metric}, {which} is better; {comparison.counted(task)}\n")
        if comparison.uninformative(task):
            parts.append(f"**{comparison.uninformative(task)}**\n")
        lines = [[cells[column] for column in columns] for cells in (entry.cells() for entry in entries)]
        parts.append(_markdown_table(head, lines, 1))
        if along := positions.table(comparison, task):
            parts.append(f"### {task} by position\n\n{positions.NOTE.format(comparison.baseline)}\n")
            parts.append(_markdown_table(*along, 1))
    return "\n".join(parts)


def _markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |\n"

    rule = "|" + "---|" * left + "---:|" * (len(head) - left) + "\n"
    return line(head) + rule + "".join(map(line, lines))


def terminal_table(comparison: Comparison) -> Table:
    """Return the table that the command prints."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("task", "policy"):
        table.add_column(column, overflow="fold")
    nats = ["nats"] if any(entry.nats is not None for entry in comparison.entries) else []
    for column in ("kept", "score", f"to {comparison.baseline}", "p", *nats):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in comparison.entries:
        cells = entry.cells()
        difference = cells["difference"].partition(" ")[0]
        shown = (cells["kept"], cells["score"], difference, cells["p"], *(cells[column] for column in nats))
        table.add_row(entry.row.task, entry.name, *shown)
    return table
