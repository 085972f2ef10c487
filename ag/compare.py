"""What to evict with, at my budget, on my tasks: ``python -m ag.compare policies=[full,h2o] budgets=[0.25]``."""

from __future__ import annotations

import sys

import torch
from rich.console import Console

from ag.config.command_line import parse
from ag.errors import UserError
from ag.evaluate.comparison import CompareConfig as CompareConfig
from ag.evaluate.comparison import compare as compare
from ag.evaluate.comparison.cells import plan
from ag.evaluate.comparison.report import terminal_table


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2: one line on stderr says what is wrong)."""
    invocation = parse(sys.argv[1:] if argv is None else argv, CompareConfig, "ag.compare")
    console = Console()
    try:
        if invocation.dry_run:
            print(*(cell.name for cell in plan(invocation.config)), sep="\n")
            return 0
        comparison = compare(invocation.config, console)
    except UserError as error:
        print(f"ag.compare: error: {error}", file=sys.stderr)
        return 2
    console.print(terminal_table(comparison))
    for task in comparison.tasks:
        remark = comparison.uninformative(task)
        console.print(f"{task}: {comparison.counted(task)}{remark and f'; {remark}'}", soft_wrap=True)
    console.print(f"{comparison.folder / 'report.html'}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    sys.exit(main())
