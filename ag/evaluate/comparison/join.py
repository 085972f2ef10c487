"""Several comparisons as one: the finished cells of their folders, under names that tell them apart."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from pandas import DataFrame

from ag.config.policies import FULL
from ag.errors import UserError
from ag.evaluate.comparison import tables
from ag.evaluate.comparison.folder import ROWS, FinishedCell, Folder
from ag.evaluate.tasks.base import HUB

#: Rows that differ in one of these are not paired.
WAYS = "task", "model", "model_checksum", "revision", "adapter", "dtype", "quantization"
FULL_POLICY = f"ag.policy({FULL!r}"  # the repr of a full cache begins so
OPTION = "option "  # before the name of a task's option among these


def join(paths: Sequence[Path]) -> tuple[list[FinishedCell], str]:
    """Read the finished cells of several folders, of all commands that wrote there, and where their data came from.

    A task that was measured in several ways (model, adapter, data, options) is several tasks, whose names say what
    differs; data is what the samples contain, as far as this is known, and not its place. A label of several policies
    gets the name of its folder, and a number if several commands gave it to several policies there. Of equal rows the
    one with the most samples remains.

    Raises:
        UserError: no row can be read.
    """
    cells, conditions, folders = _read_cells(paths)
    if not cells:
        raise UserError(f"folders={[*map(str, paths)]}: {ROWS} has no row that can be read; run the commands again.")
    unique: dict[tuple[str, str], FinishedCell] = {}
    for cell in _with_folders_in_labels(_with_conditions_in_tasks(cells, conditions), folders).values():
        task_and_name = cell.summary.task, cell.summary.name
        if task_and_name not in unique or unique[task_and_name].summary.n <= cell.summary.n:
            unique[task_and_name] = cell
    return list(unique.values()), "; ".join(conditions.data.unique())


def data_places(root: str | None, roots: dict[str, str]) -> str:
    """Return where the samples of a comparison come from, as text."""
    folders = [HUB if root is None else str(Path(root).resolve())]
    return "; ".join([*folders, *(f"{task}: {Path(path).resolve()}" for task, path in roots.items())])


def _read_cells(paths: Sequence[Path]) -> tuple[dict[str, FinishedCell], DataFrame, dict[str, str]]:
    """Return the cells of all folders, what each was measured with, and the name of its folder, by the cells' keys."""
    cells, conditions, folders = dict[str, FinishedCell](), dict[str, dict[str, str]](), dict[str, str]()
    for path, folder in _folder_names(paths).items():
        file = path / "config.yaml"
        settings = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
        last_data = data_places(settings.get("root"), settings.get("roots") or {}) if settings else tables.UNKNOWN
        for key, cell in Folder(path).read().items():
            if key not in cells or cells[key].summary.problem is not None:
                cells[key], folders[key] = cell, folder
                ways = {name: str(getattr(cell.summary, name)) for name in WAYS}
                options = {OPTION + name: str(value) for name, value in (cell.summary.task_options or {}).items()}
                conditions[key] = ways | {"data": cell.summary.data or last_data} | options
    first_samples = {key: cell.outcomes[0].content_hash if cell.outcomes else "" for key, cell in cells.items()}
    places = {(conditions[key]["task"], content): conditions[key]["data"] for key, content in first_samples.items()}
    for key, content in first_samples.items():
        if content:  # one place of equal data: earlier versions wrote another one of generated samples
            conditions[key]["data"] = places[conditions[key]["task"], content]
    for key, number in _content_numbers(cells, conditions).items():
        conditions[key]["contents"] = str(number)
    return cells, DataFrame.from_dict(conditions, orient="index").astype(object), folders


def _content_numbers(cells: dict[str, FinishedCell], conditions: dict[str, dict[str, str]]) -> dict[str, int]:
    """Return a number for each cell: cells that were measured alike, and whose samples have equal contents, share it.

    A sample of equal id has other contents if its file has changed, or if another ``max_tokens`` cuts it.
    """
    groups: dict[tuple[tuple[str, str], ...], list[dict[str, str]]] = {}  # the known contents of each number, by id
    numbers = {}
    for key, cell in cells.items():
        known = {outcome.sample: outcome.content_hash for outcome in cell.outcomes if outcome.content_hash}
        contents = groups.setdefault(tuple(sorted(conditions[key].items())), [])
        equal = (x for x in contents if all(x.get(sample, content) == content for sample, content in known.items()))
        if (same := next(equal, None)) is None:
            contents.append(same := {})
        same |= known
        numbers[key] = contents.index(same) + 1
    return numbers


def _with_conditions_in_tasks(cells: dict[str, FinishedCell], conditions: DataFrame) -> dict[str, FinishedCell]:
    """Return the cells; a task that was measured in several ways says in its name what differs."""
    renamed = dict(cells)
    for task, group in conditions.groupby("task", sort=False):
        differing = [name for name in group if group[name].nunique(dropna=False) > 1]
        for key, row in group[differing].iterrows() if differing else ():
            values = row.fillna(tables.UNKNOWN).items()
            way = ", ".join(f"{str(name).removeprefix(OPTION)}={value}" for name, value in values)
            renamed[key] = cells[key].renamed(task=f"{task} ({way})")
    return renamed


def _with_folders_in_labels(cells: dict[str, FinishedCell], folders: dict[str, str]) -> dict[str, FinishedCell]:
    """Return the cells; a label of several policies has the name of its folder, and a number if that is not enough."""
    policies = {key: _policy_without_budget(cell) for key, cell in cells.items()}
    policies_of_label: dict[str, set[str]] = {}
    for key, cell in cells.items():
        policies_of_label.setdefault(cell.summary.label, set()).add(policies[key])
    renamed, policies_there = dict(cells), dict[tuple[str, str], list[str]]()  # by label and folder, in order
    for key, cell in cells.items():
        label = cell.summary.label
        if len(policies_of_label[label]) > 1:
            there = policies_there.setdefault((label, folders[key]), [])
            there += [] if policies[key] in there else [policies[key]]
            number = there.index(policies[key]) + 1
            renamed[key] = cell.renamed(label=f"{label} ({folders[key]}{f', {number}' if number > 1 else ''})")
    return renamed


def _policy_without_budget(cell: FinishedCell) -> str:
    """Return what a label means: the policy without its budget, and the checksum of its gates."""
    policy = cell.summary.policy.replace(f"budget={cell.summary.budget!r}", "")
    if policy.startswith(FULL_POLICY):  # evicts nothing: slots are positions, and a schedule has nothing to do
        policy = re.sub(r", (positions='(original|slot)'|schedule='[^']*')", "", policy)
    return f"{policy} {cell.summary.gates_checksum}"


def _folder_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Return absolute paths without repetition, each with its last parts: as few as make all of them different."""
    folders = dict.fromkeys(path.resolve() for path in paths)
    names = ({path: "/".join(path.parts[-count:]) for path in folders} for count in itertools.count(1))
    return next(each for each in names if len({*each.values()}) == len(each))
