"""A comparison from its configuration to its page."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from rich.console import Console

from ag.commands.compare import CompareConfig
from ag.config.command_line import Invocation
from ag.config.recipes import dump
from ag.config.sections import WandbConfig
from ag.errors import BudgetWarning
from ag.evaluate.comparison.cells import list_cells
from ag.evaluate.comparison.charts import save
from ag.evaluate.comparison.folder import DamagedRowWarning, Folder
from ag.evaluate.comparison.page import render
from ag.evaluate.comparison.result import NOT_COMPARED, Comparison, uncompared_results
from ag.evaluate.comparison.tables import counted, markdown, printed
from ag.evaluate.comparison.work import run_missing_cells
from ag.training.artifacts import log_report


def run(invocation: Invocation[CompareConfig]) -> int:
    """Run ``python -m ag.compare`` and print its table; returns the exit code (2: cells failed)."""
    if invocation.dry_run:
        print(*(cell.name for cell in list_cells(invocation.config)), sep="\n")
        return 0
    console = Console()
    comparison = compare(invocation.config, console, invocation.line)
    console.print(printed(comparison))
    for task in comparison.tasks:
        remark = comparison.uninformative(task)
        console.print(f"{task}: {counted(comparison, task)}{remark and f'; {remark}'}", soft_wrap=True)
    if sentences := uncompared_results(comparison):
        console.print(f"{NOT_COMPARED} {'; '.join(sentences)}", soft_wrap=True)
    console.print(f"{comparison.folder / 'report.html'}", soft_wrap=True)
    if "wandb" in invocation.config.logger:
        log(comparison, comparison.folder, invocation.config.recipe, invocation.config.wandb)
    for result in comparison.failed:
        print(f"ag.compare: error: {result.summary.task}: {result.name}: {result.summary.problem}", file=sys.stderr)
    return 2 if comparison.failed else 0


def compare(config: CompareConfig, console: Console, command: str = "") -> Comparison:
    """Run the cells that are missing in the output folder, and write its table, plots and page.

    Args:
        config: what to compare.
        console: where progress is shown.
        command: the command line, for the rows. Empty: the rows name the call of this function.

    Raises:
        UserError: a policy, a task, the model or the data is wrong; the message names the fix.
        KeyboardInterrupt: on Ctrl-C; the message names the missing cells.
    """
    cells = list_cells(config)
    folder = Folder(Path(config.output or f"runs/{config.recipe}"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DamagedRowWarning)
        warnings.simplefilter("ignore", BudgetWarning)  # rows count them
        finished = run_missing_cells(config, cells, folder, console, command)
    for warning in caught:
        console.print(f"warning: {warning.message}", soft_wrap=True)
    comparison = Comparison.of(config, cells, finished, folder.path)
    (folder.path / "config.yaml").write_text(dump(config))
    (folder.path / "table.md").write_text(markdown(comparison), encoding="utf-8")
    save(comparison)
    (folder.path / "report.html").write_text(render(comparison), encoding="utf-8")
    if comparison.hidden:
        console.print(f"{len(comparison.hidden)} rows of earlier commands are in the folder and not shown.")
    return comparison


COLUMNS = ("label", "budget", "task", "metric", "kept", "mean", "error", "n", "kv_bytes")


def log(comparison: Comparison, run_folder: Path, name: str, settings: WandbConfig) -> None:
    """Log a comparison to the W&B run of a folder: its own, or the folder of an ``ag.fit`` run."""
    rows = [[getattr(result.summary, column) for column in COLUMNS] for result in comparison.results]
    log_report(comparison.folder, run_folder, f"{name}-report", settings, COLUMNS, rows)
