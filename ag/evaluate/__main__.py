"""A run's gates on its own validation rows: ``python -m ag.evaluate run=RUN policies=[full,gates,h2o] budgets=[0.5]``.

A preset of ``ag.compare`` with the task ``responses``.
"""

from __future__ import annotations

import json
import sys

from rich.console import Console

from ag.config.command_line import command, parse
from ag.evaluate.config import EvaluateConfig as EvaluateConfig


@command("ag.evaluate")
def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code (2: a line on stderr says what is wrong)."""
    invocation = parse(argv, EvaluateConfig, "ag.evaluate")
    # these load torch and transformers, which no help needs
    from ag.evaluate.comparison.cells import list_cells
    from ag.evaluate.comparison.conditions import typed
    from ag.evaluate.comparison.run import compare
    from ag.evaluate.preset import TASK, figures, table, translate

    preset = translate(invocation.config)
    if invocation.dry_run:
        print(*(cell.name for cell in list_cells(preset.config)), sep="\n")
        return 0
    console = Console()
    comparison = compare(preset.config, console, typed("ag.evaluate", argv))
    results = {preset.name(entry): entry for entry in comparison.entries if entry.outcomes}
    text = json.dumps({name: figures(entry) for name, entry in results.items()}, indent=2)
    invocation.config.file.write_text(text, encoding="utf-8")
    if results:
        console.print(table(results, comparison.counted(TASK)))
        console.print(f"{comparison.folder / 'report.html'}", soft_wrap=True)
    for entry in comparison.failed:
        print(f"ag.evaluate: error: {preset.name(entry)}: {entry.row.problem}", file=sys.stderr)
    return 2 if comparison.failed else 0


if __name__ == "__main__":
    sys.exit(main())
