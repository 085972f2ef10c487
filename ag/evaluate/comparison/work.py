"""Runs the missing cells of a comparison, in this process or in those of a cluster."""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ag import cluster
from ag.commands.compare import CompareConfig
from ag.engine import EvictionCache
from ag.errors import UserError
from ag.evaluate.comparison.cells import Cell
from ag.evaluate.comparison.folder import Ended, Folder
from ag.evaluate.comparison.progress import Progressing
from ag.evaluate.inside import View, record
from ag.evaluate.tasks import Loaded, Outcome, Sample, Task
from ag.gates import export
from ag.hardware import cpu_name
from ag.model import base as models
from ag.plugins import load

WORKER = 2  # main memory of a process on a cluster, in multiples of the stored weights of the model


def fill(
    config: CompareConfig, cells: Sequence[Cell], folder: Folder, console: Console, command: str = ""
) -> dict[str, Ended]:
    """Run the cells without a result, here or on a cluster; this process writes the results.

    Args:
        config: settings of the comparison.
        cells: its cells.
        folder: its folder.
        console: where progress is shown.
        command: the command line, for the summaries. Empty means the Python call.

    Returns:
        All cells of the folder by key, those of earlier commands included.

    Raises:
        UserError: the model or a task's data cannot be read, or another process writes into the folder.
        KeyboardInterrupt: on Ctrl-C; the message names what is left.
    """
    with folder.writing():
        found = folder.read()
        again = {key for key, ended in found.items() if config.retry and ended.summary.problem is not None}
        missing = [cell for cell in cells if cell.key in again or cell.key not in found]
        done = len(cells) - len(missing)
        progress = Progressing(console, len(cells), done)
        try:
            with progress.shown():
                progress.cells(done)
                for together in _ended(config, missing, command or called(config), progress):
                    for ended in together:
                        folder.append(ended)
                        found[ended.summary.key] = ended
                        done += 1
                    progress.cells(done)  # once: a part of a pass that is over would look like a slow one
        except KeyboardInterrupt:
            kept = f"{done} of {len(cells)} cells are in {folder.path}"
            raise KeyboardInterrupt(f"{kept}; the same command goes on from there") from None
    return found


def _ended(config: CompareConfig, cells: Sequence[Cell], command: str, progress: Progressing) -> Iterator[list[Ended]]:
    """Run cells and yield those that are finished together."""
    if not cells:  # needs neither a model nor a cluster
        return
    most, by_task = config.batch_policies, [[*some] for _, some in groupby(cells, lambda cell: cell.task)]
    units = [some[first : first + most] for some in by_task for first in range(0, len(some), most)]
    if config.cluster is None:
        worker = Worker(config, command, progress)
        for unit in units:
            yield from worker.run(unit)
        return
    memory = WORKER * models.stored_nbytes(config.model, config.revision)
    room = cluster.Room.on(config.device, cpus=torch.get_num_threads(), memory=memory)
    with cluster.connected(config.cluster):
        make = partial(_remote, config, command, torch.get_num_threads())
        for unit, ended in cluster.share(units, make, room):
            if isinstance(ended, cluster.Lost):
                why = f"{ended.times} workers ended while they worked on it: {ended.why}"
                where = conditions(config, command)
                ended = [Ended(cell.summary([], Loaded([]), "", where, why), [], []) for cell in unit]
            yield ended


def _remote(config: CompareConfig, command: str, threads: int) -> Callable[[list[Cell]], list[Ended]]:
    """Make a worker in a process of a cluster, with the calling process's threads, so that sums are the same."""
    torch.set_num_threads(threads)
    load(config.plugins)
    worker = Worker(config, command, Progressing(Console(quiet=True), 0))
    return lambda unit: [ended for together in worker.run(unit) for ended in together]


class Worker:
    """The model, and the samples of the current task.

    Raises:
        UserError: the model cannot be loaded.
    """

    def __init__(self, config: CompareConfig, command: str, progress: Progressing) -> None:
        self.config, self.command, self.progress = config, command, progress
        torch.set_float32_matmul_precision("highest")  # no TF32: differences between policies are small
        torch.manual_seed(config.seed)
        base, self.tokenizer = models.load_base(config.base, config.device)
        self.model: nn.Module = base if config.adapter is None else export.load_adapter(base, config.adapter)
        self.model.eval()
        context = int(base.config.get_text_config().max_position_embeddings)
        self.max_tokens = min(context, config.max_tokens or context)
        self.task: Task | None = None
        self.loaded = Loaded([])

    def run(self, cells: Sequence[Cell]) -> Iterator[list[Ended]]:
        """Run cells of one task together; if that fails, one by one on the samples that are left.

        Yields the cells that are finished at the same time.

        Raises:
            UserError: the task's data cannot be read.
        """
        try:
            if cells[0].task != self.task:
                self.task, self.loaded = None, Loaded([])
                self.loaded = cells[0].task.load(self.tokenizer, self.config.samples, self.max_tokens)
                self.task = cells[0].task
        except UserError:
            raise
        except Exception as error:  # a task of a plugin may raise anything
            yield [self._ended(cell, problem=_problem(error)) for cell in cells]
            return
        done: list[list[Outcome]] = [[] for _ in cells]
        ended = self._attempt(cells, done)
        if not isinstance(ended, str):
            yield ended
            return
        torch.cuda.empty_cache()  # the error, whose traceback held tensors, is gone
        for place, (cell, outcomes) in enumerate(zip(cells, done, strict=True), 1):
            waiting = sum(map(len, done[place:]))
            alone = ended if len(cells) == 1 else self._attempt([cell], [outcomes], waiting)
            yield [self._ended(cell, problem=alone)] if isinstance(alone, str) else alone

    def _attempt(self, cells: Sequence[Cell], done: list[list[Outcome]], waiting: int = 0) -> list[Ended] | str:
        """Run cells; returns them finished, or why that failed.

        Args:
            cells: cells of one task.
            done: by cell, the outcomes of its first samples, which are not run again; the others are appended.
            waiting: samples that the cells after these have done.
        """
        self.progress.begin(cells[0].name, len(cells), len(self.loaded.samples), waiting)
        try:
            return self._run(cells, done)
        except Exception as error:  # a part of a plugin may raise anything
            return _problem(error)

    def _run(self, cells: Sequence[Cell], done: list[list[Outcome]]) -> list[Ended]:
        samples = self.loaded.samples
        refused = [cell for cell in cells if 0 < cell.untouched(samples, self._prefill(cell)) == len(samples)]
        touched = [cell for cell in cells if cell not in refused]
        mine = [outcomes for cell, outcomes in zip(cells, done, strict=True) if cell not in refused]
        policies = [cell.policy.with_tokenizer(self.tokenizer) for cell in touched]
        if not samples:
            long, short = self.loaded.too_long, self.loaded.too_short
            raise UserError(
                f"no sample can be run: {long} are longer than {self.max_tokens} tokens, {short} are too short."
            )
        first = _first(mine, samples) if touched else len(samples)
        for outcomes in mine:
            del outcomes[first:]
        self.progress.outcome(first * len(mine))
        rest = samples[first:]
        for index, outcome in cells[0].task.run(self.model, self.tokenizer, policies, rest) if rest else ():
            for name, value in (("score", outcome.score), *outcome.tags.items()):  # JSON has finite numbers alone
                if isinstance(value, float) and not math.isfinite(value):
                    raise UserError(
                        f"sample {outcome.sample} has the {name} {value}: expected a finite number; try dtype=float32."
                    )
            mine[index].append(outcome)
            self.progress.outcome()
        shown = [sample for sample in samples if sample.prompt][: self.config.view_samples]
        views = record(self.model, self.tokenizer, policies, shown, self.config.view_tokens)
        found = [self._ended(cell, had, seen) for cell, had, seen in zip(touched, mine, views, strict=True)]
        return found + [self._ended(cell, problem=cell.refusal()) for cell in refused]

    def _ended(
        self, cell: Cell, outcomes: Sequence[Outcome] = (), views: Sequence[View] = (), problem: str | None = None
    ) -> Ended:
        """Return a finished cell; see :meth:`Cell.summary`."""
        try:
            prefill = self._prefill(cell)
        except Exception:  # perhaps the reason why the cell failed
            prefill = ""
        where = conditions(self.config, self.command)
        return Ended(cell.summary(outcomes, self.loaded, prefill, where, problem), [*outcomes], [*views])

    def _prefill(self, cell: Cell) -> str:
        return EvictionCache(self.model, cell.policy).prompt_sees


def _first(done: Sequence[Sequence[Outcome]], samples: Sequence[Sample]) -> int:
    """Return how many first samples all cells have done; 0 where a plugin's task ran them in another order."""
    first = min(map(len, done))
    in_order = [outcome.sample for outcome in done[0][:first]] == [sample.id for sample in samples[:first]]
    return first if in_order else 0


def _problem(error: Exception) -> str:
    """Return why a cell failed; of an error that is not a ``UserError``, its type and place too."""
    text = " ".join(str(error).split())[:500]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return f"out of memory: {text}"
    if isinstance(error, UserError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if f"{os.sep}torch{os.sep}" not in frame.filename), frames[-1])
    return f"{type(error).__name__}: {text} ({Path(last.filename).name}, line {last.lineno})"


def conditions(config: CompareConfig, command: str) -> dict[str, Any]:
    """Return the fields of a :class:`Summary` on the model, the machine, the date and the command."""
    device = torch.device(config.device)
    return {
        "dtype": config.dtype,
        "quantization": config.quantization,
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
    }


def called(config: CompareConfig) -> str:
    """Return the Python call of a comparison, with the settings that differ from the defaults."""
    plain, values = CompareConfig(), {field.name: getattr(config, field.name) for field in fields(config)}
    given = [f"{name}={value!r}" for name, value in values.items() if value != getattr(plain, name)]
    return f"compare(CompareConfig({', '.join(given)}), console)"
