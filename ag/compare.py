"""What to evict with, at my budget, on my tasks: ``python -m ag.compare policies=[full,h2o] budgets=[0.25]``."""

from __future__ import annotations

import sys

from rich.console import Console

from ag.config.command_line import command, parse
from ag.evaluate.comparison.config import CompareConfig as CompareConfig


@command("ag.compare")
def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code (2: lines on stderr say what is wrong, one for each failed cell)."""
    invocation = parse(argv, CompareConfig, "ag.compare")
    # these load torch and transformers, which no help needs
    from ag.evaluate.comparison.cells import list_cells
    from ag.evaluate.comparison.conditions import typed
    from ag.evaluate.comparison.report import terminal_table
    from ag.evaluate.comparison.run import compare
    from ag.evaluate.comparison.shares import APART

    if invocation.dry_run:
        print(*(cell.name for cell in list_cells(invocation.config)), sep="\n")
        return 0
    console = Console()
    comparison = compare(invocation.config, console, typed("ag.compare", argv))
    console.print(terminal_table(comparison))
    for task in comparison.tasks:
        remark = comparison.uninformative(task)
        console.print(f"{task}: {comparison.counted(task)}{remark and f'; {remark}'}", soft_wrap=True)
    if apart := comparison.apart():
        console.print(f"{APART} {'; '.join(apart)}", soft_wrap=True)
    console.print(f"{comparison.folder / 'report.html'}", soft_wrap=True)
    for entry in comparison.failed:
        print(f"ag.compare: error: {entry.row.task}: {entry.name}: {entry.row.problem}", file=sys.stderr)
    return 2 if comparison.failed else 0


if __name__ == "__main__":
    sys.exit(main())
