"""A comparison as ``table.md``, plots, ``report.html`` and a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from ag.evaluate.comparison import by_position
from ag.evaluate.comparison.conditions import measured, prompts
from ag.evaluate.comparison.drawing import save
from ag.evaluate.comparison.findings import OVER, OVER_NOTE, Comparison
from ag.evaluate.comparison.page import render
from ag.evaluate.comparison.shares import APART
from ag.evaluate.comparison.verdict import headlines, verdicts


def write(comparison: Comparison) -> None:
    """Write ``table.md``, the plots and ``report.html``."""
    folder = comparison.folder
    (folder / "table.md").write_text(markdown(comparison), encoding="utf-8")
    save(comparison)
    (folder / "report.html").write_text(render(comparison), encoding="utf-8")


def markdown(comparison: Comparison) -> str:
    """Return the comparison as Markdown: verdicts, the leaderboard, a table for each task, how it was measured."""
    head = ["policy", *comparison.tasks, *(f"average {metric}" for metric in comparison.averaged)]
    lines = []
    for name, rows, averages in comparison.leaders():
        scores = ["" if row is None else "none" if row.mean is None else f"{row.mean:.4f}" for row in rows]
        lines.append([name, *scores, *("none" if mean is None else f"{mean:.4f}" for mean in averages)])
    judged = verdicts(comparison)
    first = headlines(judged)
    parts = [f"- {one}." for one in [*first, *(one for one in judged if one not in first)]]
    parts += ["", "## Scores\n"] if judged else []
    parts += [_markdown_table(head, lines, 1), *(f"- {name}: `{one}`" for name, one in comparison.meanings.items())]
    parts += [""] if comparison.meanings else []
    for task in comparison.tasks:
        entries = comparison.of_task(task)
        row = entries[0].row
        which = "higher" if row.higher_is_better else "lower"
        columns = comparison.columns(task)
        head = [{"score": row.metric, "difference": f"against {comparison.baseline}"}.get(c, c) for c in columns]
        parts.append(f"## {task}\n\n{row.metric}, {which} is better; {comparison.counted(task)}\n")
        parts.append(f"{prompts(entry.row for entry in entries)}\n")
        if comparison.uninformative(task):
            parts.append(f"**{comparison.uninformative(task)}**\n")
        lines = [[cells[column] for column in columns] for cells in (entry.cells() for entry in entries)]
        parts.append(_markdown_table(head, lines, 1))
        if OVER in columns:
            parts.append(f"{OVER}: {OVER_NOTE}.\n")
        if along := by_position.table(comparison, task):
            parts.append(f"### {task} by position\n\n{by_position.NOTE.format(comparison.baseline)}\n")
            parts.append(_markdown_table(*along, 1))
    if apart := comparison.apart():
        parts += [f"{APART}\n", *(f"- {one}" for one in apart), ""]
    found = measured([entry.row for entry in comparison.entries])
    parts.append("## How it was measured\n\n" + "".join(f"- {what}: {_code(what, text)}\n" for what, text in found))
    return "\n".join(parts)


def _code(what: str, text: str) -> str:
    return f"`{text}`" if what == "command" else text


def _markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |\n"

    rule = "|" + "---|" * left + "---:|" * (len(head) - left) + "\n"
    return line(head) + rule + "".join(map(line, lines))


def terminal_table(comparison: Comparison) -> Table:
    """Return the table that the command prints."""
    over = any(entry.row.over_budget for entry in comparison.entries)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=f"* {OVER}: there are {OVER_NOTE}" if over else None)
    for column in ("task", "policy"):
        table.add_column(column, overflow="fold")
    nats = ["nats"] if any(entry.nats is not None for entry in comparison.entries) else []
    for column in ("kept", "score", f"to {comparison.baseline}", "p", *nats):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in comparison.entries:
        cells = entry.cells()
        difference = cells["difference"].partition(" ")[0]
        kept = f"*{cells['kept']}" if entry.row.over_budget else cells["kept"]  # little room: table.md says how many
        score = cells["score"] if entry.row.problem is None else "none"  # the command says why in a line of its own
        shown = (kept, score, difference, cells["p"], *(cells[column] for column in nats))
        table.add_row(entry.row.task, entry.name, *shown)
    return table
