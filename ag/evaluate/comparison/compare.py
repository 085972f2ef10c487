"""Comparisons from their settings to their files, and several comparisons as one."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from pandas import DataFrame
from rich.console import Console

from ag.commands.compare import CompareConfig, name_with_kv_dtype
from ag.commands.report import ReportConfig
from ag.config.command_line import Invocation
from ag.config.recipes import dump
from ag.config.sections import WandbConfig
from ag.errors import BudgetWarning, UserError, check_known
from ag.evaluate.comparison import figures, tables
from ag.evaluate.comparison.cells import list_cells
from ag.evaluate.comparison.folder import ROWS, FinishedCell, Folder
from ag.evaluate.comparison.page import render
from ag.evaluate.comparison.rows import NOT_COMPARED, Comparison, uncompared_results
from ag.evaluate.comparison.work import run_missing_cells
from ag.evaluate.tasks.base import HUB
from ag.training.artifacts import log_report

WAYS = "task", "model", "revision", "adapter", "dtype", "quantization"  # rows that differ in one are not paired
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
    earlier_data = _data(config.root, config.roots)  # of rows that do not have it, of earlier versions
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
        if label is not None and not (label == "full" and name == "baseline"):
            check_known(label, labels, name)
    if invocation.dry_run:
        print(*(f"{cell.summary.task}: {cell.summary.name}" for cell in cells), sep="\n")
        return 0
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(cells, output, config.baseline, config.mine, data)
    write(comparison)
    show(comparison, console)
    return 0


def join(paths: Sequence[Path]) -> tuple[list[FinishedCell], str]:
    """Read the finished cells of several folders, of all commands that wrote there, and where their data came from.

    A task that was measured in several ways (model, adapter, data, options) is several tasks, whose names say what
    differs; data is what the first sample contains, as far as this is known, and not its place. A label of several
    policies gets the name of its folder, and a number if several commands gave it to several policies there. Of equal
    rows the one with the most samples remains.

    Raises:
        UserError: no row can be read.
    """
    cells, conditions, folders = dict[str, FinishedCell](), dict[str, dict[str, str]](), dict[str, str]()
    for path, folder in _folder_names(paths).items():
        file = path / "config.yaml"
        settings = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
        last_data = _data(settings.get("root"), settings.get("roots") or {}) if settings else tables.UNKNOWN
        for key, cell in Folder(path).read().items():
            if key not in cells or cells[key].summary.problem is not None:
                cells[key], folders[key] = cell, folder
                ways = {name: str(getattr(cell.summary, name)) for name in WAYS}
                options = {name: str(value) for name, value in (cell.summary.task_options or {}).items()}
                conditions[key] = ways | {"data": cell.summary.data or last_data} | options
    if not cells:
        raise UserError(f"folders={[*map(str, paths)]}: {ROWS} has no row that can be read; run the commands again.")
    first_samples = {key: cell.outcomes[0].content_hash if cell.outcomes else "" for key, cell in cells.items()}
    places = {(conditions[key]["task"], content): conditions[key]["data"] for key, content in first_samples.items()}
    for key, content in first_samples.items():
        if content:  # one place of equal data: earlier versions wrote another one of generated samples
            conditions[key]["data"] = places[conditions[key]["task"], content]
    measured = DataFrame.from_dict(conditions, orient="index").astype(object)
    for task, group in measured.groupby("task", sort=False):
        differing = [name for name in group if group[name].nunique(dropna=False) > 1]
        for key, row in group[differing].iterrows() if differing else ():
            way = ", ".join(f"{name}={value}" for name, value in row.fillna(tables.UNKNOWN).items())
            cells[key] = cells[key].renamed(task=f"{task} ({way})")
    policies: dict[tuple[str, str], set[str]] = {}  # by name and task
    for summary, *_ in cells.values():
        policies.setdefault((summary.name, summary.task), set()).add(summary.policy)
    ambiguous = {name for (name, _), meant in policies.items() if len(meant) > 1}
    ambiguous_labels = {summary.label for summary, *_ in cells.values() if summary.name in ambiguous}
    meanings: dict[tuple[str, str], list[str]] = {}  # policies without their budgets, by label and folder
    unique: dict[tuple[str, str], FinishedCell] = {}
    for key, cell in cells.items():
        label = cell.summary.label
        if label in ambiguous_labels:
            of_label = meanings.setdefault((label, folders[key]), [])
            meaning = cell.summary.policy.replace(f"budget={cell.summary.budget!r}", "")
            of_label += [] if meaning in of_label else [meaning]
            number = of_label.index(meaning) + 1
            cell = cell.renamed(label=f"{label} ({folders[key]}{f', {number}' if number > 1 else ''})")
        task_and_name = cell.summary.task, cell.summary.name
        if task_and_name not in unique or unique[task_and_name].summary.n <= cell.summary.n:
            unique[task_and_name] = cell
    return list(unique.values()), "; ".join(measured.data.unique())


def _folder_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Return absolute paths without repetition, each with its last parts: as few as make all of them different."""
    folders = dict.fromkeys(path.resolve() for path in paths)
    names = ({path: "/".join(path.parts[-count:]) for path in folders} for count in itertools.count(1))
    return next(each for each in names if len({*each.values()}) == len(each))


def _data(root: str | None, roots: dict[str, str]) -> str:
    """Return where the samples of a comparison come from, as text."""
    folders = [HUB if root is None else str(Path(root).resolve())]
    return "; ".join([*folders, *(f"{task}: {Path(path).resolve()}" for task, path in roots.items())])
