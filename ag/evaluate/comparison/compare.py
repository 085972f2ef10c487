"""Comparisons from their settings to their files: what ``ag.compare`` and ``ag.report`` run."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from rich.console import Console

from ag.commands.compare import CompareConfig, name_with_kv_dtype
from ag.commands.report import ReportConfig
from ag.config.command_line import Invocation
from ag.config.policies import FULL
from ag.config.recipes import dump
from ag.config.sections import WandbConfig
from ag.errors import BudgetWarning, UserError, check_known
from ag.evaluate.comparison import figures, tables
from ag.evaluate.comparison.cells import list_cells
from ag.evaluate.comparison.folder import Folder
from ag.evaluate.comparison.join import data_places, join
from ag.evaluate.comparison.page import render
from ag.evaluate.comparison.rows import NOT_COMPARED, Comparison, uncompared_results
from ag.evaluate.comparison.work import run_missing_cells
from ag.training.artifacts import log_report

COLUMNS = ["label", "budget", "task", "metric", "kept", "mean", "error", "n", "kv_bytes"]  # of the table at W&B


def run(invocation: Invocation[CompareConfig]) -> int:
    """Run ``python -m ag.compare`` and print its table; returns the exit code (2: cells failed)."""
    if invocation.dry_run:
        print(*(cell.name for cell in list_cells(invocation.config)), sep="\n")
        return 0
    console = Console()
    comparison = compare(invocation.config, console, invocation.line)
    show(comparison, console)
    if "wandb" in invocation.config.logger:
        log(comparison, comparison.folder, invocation.config.recipe, invocation.config.wandb)
    for row in comparison.failed:
        print(f"ag.compare: error: {row.task}: {row.name}: {row.problem}", file=sys.stderr)
    if comparison.failed:
        print("ag.compare: the same command with retry=true runs these again", file=sys.stderr)
    return 2 if comparison.failed else 0


def compare(config: CompareConfig, console: Console, command: str = "") -> Comparison:
    """Run the cells that are missing in the output folder, and write its tables, figures and page.

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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)  # rows count them
        finished = run_missing_cells(config, cells, folder, console, command)
    shown = [finished.pop(cell.key) for cell in cells]
    kv_dtype = next(iter(config.ordered_kv_dtypes), "float")
    names = config.baseline, config.mine or config.policies[-1]
    baseline, my_policy = (name_with_kv_dtype(config.table_names.get(name, name), kv_dtype) for name in names)
    hidden = [f"{other.summary.task}: {other.summary.name}" for other in finished.values()]
    earlier_data = data_places(config.root, config.roots)  # of rows that do not have it, of earlier versions
    data = "; ".join(dict.fromkeys(cell.summary.data or earlier_data for cell in shown))
    comparison = Comparison(shown, folder.path, baseline, my_policy, data, hidden)
    (folder.path / "config.yaml").write_text(dump(config), encoding="utf-8")
    write(comparison)
    if hidden:
        console.print(f"{len(hidden)} rows of earlier commands are in the folder and not shown.")
    return comparison


def write(comparison: Comparison) -> None:
    """Write the tables, figures and the page of a comparison into its folder."""
    tables.write(comparison)
    charts = figures.all_charts(comparison)
    figures.save(comparison, charts)
    (comparison.folder / "report.html").write_text(render(comparison, charts), encoding="utf-8")


def show(comparison: Comparison, console: Console) -> None:
    """Print the table of a comparison, what was counted, and where the page is."""
    lines = []
    for task in comparison.tasks:
        remark = comparison.uninformative(task)
        lines.append(f"{task}: {tables.counted(comparison, task)}{remark and f'; {remark}'}")
    if sentences := uncompared_results(comparison):
        lines.append(f"{NOT_COMPARED} {'; '.join(sentences)}")
    console.print(tables.printed(comparison))
    console.print(*lines, f"{comparison.folder / 'report.html'}", sep="\n", soft_wrap=True)


def log(comparison: Comparison, run_folder: Path, name: str, settings: WandbConfig) -> None:
    """Log a comparison to the W&B run of a folder: its own, or the folder of an ``ag.fit`` run."""
    rows = comparison.rows[COLUMNS].astype(object)
    rows = rows.where(rows.notna(), None)
    log_report(comparison.folder, run_folder, f"{name}-report", settings, COLUMNS, rows.values.tolist())


def report(invocation: Invocation[ReportConfig]) -> int:
    """Run ``python -m ag.report`` and print the joined table; returns the exit code."""
    config, console = invocation.config, Console()
    cells, data = join(list(map(Path, config.folders)))
    labels = list(dict.fromkeys(cell.summary.label for cell in cells))
    for name, label in (("baseline", config.baseline), ("mine", config.mine)):
        if label is not None and not (label == FULL and name == "baseline"):
            check_known(label, labels, name)
    full_labels = [label for label in labels if label.startswith(f"{FULL} (")]
    if config.baseline == FULL and FULL not in labels and full_labels:
        raise UserError(
            f"baseline=full: the full caches of these folders differ in their options: expected one of them, such as "
            f"baseline='{full_labels[0]}'; there are {', '.join(full_labels)}."
        )
    if invocation.dry_run:
        print(*(f"{cell.summary.task}: {cell.summary.name}" for cell in cells), sep="\n")
        return 0
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(cells, output, config.baseline, config.mine, data)
    write(comparison)
    show(comparison, console)
    return 0
