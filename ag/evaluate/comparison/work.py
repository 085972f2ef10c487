"""Filling the missing cells of a comparison, beside other processes that do the same."""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ag.commands.compare import CompareConfig
from ag.engine import EvictionCache
from ag.errors import UserError
from ag.evaluate.comparison.cells import Cell
from ag.evaluate.comparison.conditions import called, conditions
from ag.evaluate.comparison.folder import Folder, Summary
from ag.evaluate.comparison.progress import Progressing
from ag.evaluate.comparison.views import View, record
from ag.evaluate.tasks import Loaded, Outcome, Sample, Task
from ag.gates import export
from ag.model import base as models

POLL_SECONDS = 0.5


def fill(
    config: CompareConfig, cells: Sequence[Cell], folder: Folder, console: Console, command: str = ""
) -> dict[str, Summary]:
    """Run the cells that have no summary yet; a cell that another process works on is waited for.

    Args:
        config: settings of the comparison.
        cells: its cells.
        folder: its folder.
        console: where progress is shown.
        command: what asked for it, for the summaries; empty: the Python call.

    Returns:
        The summary of every cell, by key.

    Raises:
        UserError: the model or a task's data cannot be had.
    """
    summaries = folder.summaries()
    again = {key for key, summary in summaries.items() if config.retry and summary.problem is not None}
    worker: _Worker | None = None
    told = False
    progress = Progressing(console, len(cells))
    with progress.shown():
        while missing := [cell for cell in cells if cell.key not in summaries or cell.key in again]:
            progress.cells(len(cells) - len(missing))
            with ExitStack() as held:
                claimed: list[Cell] = []
                for cell in missing:
                    same_task = not claimed or cell.task == claimed[0].task
                    if (
                        len(claimed) < config.batch_policies
                        and same_task
                        and held.enter_context(folder.claim(cell.key))
                    ):
                        claimed.append(cell)
                summaries = folder.summaries()  # another process may have ended one between the look and the lock
                again &= {key for key, summary in summaries.items() if summary.problem is not None}
                mine = [cell for cell in claimed if cell.key not in summaries or cell.key in again]
                if mine:
                    worker = worker or _Worker(config, folder, command or called(config))
                    worker.run(mine, progress)
                    again -= {cell.key for cell in mine}
                    summaries = folder.summaries()
            if not claimed:
                if not told:
                    console.print(f"Waiting for {len(missing)} cells that other processes work on.")
                told = True
                time.sleep(POLL_SECONDS)
                summaries = folder.summaries()
    return {cell.key: summaries[cell.key] for cell in cells}


class _Worker:
    """The model, and the samples of the task at hand."""

    def __init__(self, config: CompareConfig, folder: Folder, command: str) -> None:
        self.config, self.folder, self.command = config, folder, command
        torch.set_float32_matmul_precision("highest")  # no TF32: differences between policies are small
        torch.manual_seed(config.seed)
        base, self.tokenizer = models.load_base(config.base, config.device)
        self.model: nn.Module = base if config.adapter is None else export.load_adapter(base, config.adapter)
        self.model.eval()
        context = int(base.config.get_text_config().max_position_embeddings)
        self.max_tokens = min(context, config.max_tokens or context)
        self.task: Task | None = None
        self.loaded = Loaded([])

    def run(self, cells: Sequence[Cell], progress: Progressing) -> None:
        """Run cells of one task together; where that fails, one by one from the samples on that they have not had.

        Raises:
            UserError: the task's data cannot be had.
        """
        try:
            self._load(cells[0].task)
        except UserError:
            raise
        except Exception as error:  # a task of a plugin may raise anything
            self._fail(cells, _problem(error))
            return
        done: list[list[Outcome]] = [[] for _ in cells]
        problem = self._attempt(cells, done, progress)
        if problem is None:
            return
        torch.cuda.empty_cache()  # the error, whose traceback held tensors, is gone
        for cell, outcomes in zip(cells, done, strict=True):
            alone = problem if len(cells) == 1 else self._attempt([cell], [outcomes], progress)
            if alone is not None:
                self._fail([cell], alone)

    def _load(self, task: Task) -> None:
        if task != self.task:
            self.task, self.loaded = None, Loaded([])
            self.loaded = task.load(self.tokenizer, self.config.samples, self.max_tokens)
            self.task = task

    def _attempt(self, cells: Sequence[Cell], done: list[list[Outcome]], progress: Progressing) -> str | None:
        """Run cells and write what came out of them; returns why that failed, None where it did not.

        Args:
            cells: cells of one task.
            done: by cell, the outcomes of its first samples, which are not run again; those of others are added.
            progress: is told.
        """
        progress.begin(cells[0].name, len(cells), len(self.loaded.samples))
        try:
            found = self._run(cells, done, progress)
        except Exception as error:  # a part of a plugin may raise anything
            progress.forget()
            return _problem(error)
        for summary, outcomes, views in found:
            self.folder.append(summary, outcomes, views)
        return None

    def _run(
        self, cells: Sequence[Cell], done: list[list[Outcome]], progress: Progressing
    ) -> list[tuple[Summary, list[Outcome], list[View]]]:
        samples = self.loaded.samples
        refused = [cell for cell in cells if 0 < cell.untouched(samples, self._prefill(cell)) == len(samples)]
        touched = [cell for cell in cells if cell not in refused]
        mine = [outcomes for cell, outcomes in zip(cells, done, strict=True) if cell not in refused]
        policies = [cell.policy.with_tokenizer(self.tokenizer) for cell in touched]
        if not samples:
            raise UserError(
                f"no sample can be run: {self.loaded.too_long} are longer than {self.max_tokens} tokens, "
                f"{self.loaded.too_short} are too short."
            )
        first = _first(mine, samples) if touched else len(samples)
        for outcomes in mine:
            del outcomes[first:]
        progress.outcome(first * len(mine))
        rest = samples[first:]
        for index, outcome in cells[0].task.run(self.model, self.tokenizer, policies, rest) if rest else ():
            if not math.isfinite(outcome.score):
                raise UserError(f"sample {outcome.sample} has the score {outcome.score}.")
            mine[index].append(outcome)
            progress.outcome()
        shown = [sample for sample in samples if sample.prompt][: self.config.view_samples]
        views = record(self.model, self.tokenizer, policies, shown, self.config.view_tokens)
        found = [
            (cell.summary(outcomes, self.loaded, *self._where(cell)), outcomes, seen)
            for cell, outcomes, seen in zip(touched, mine, views, strict=True)
        ]
        return found + [(cell.failed(cell.refusal(), self.loaded, *self._where(cell)), [], []) for cell in refused]

    def _where(self, cell: Cell) -> tuple[str, dict[str, Any]]:
        try:
            prefill = self._prefill(cell)
        except Exception:  # that may be why a cell has no result
            prefill = ""
        return prefill, conditions(self.config, self.command)

    def _prefill(self, cell: Cell) -> str:
        return EvictionCache(self.model, cell.policy).prompt_sees

    def _fail(self, cells: Sequence[Cell], problem: str) -> None:
        """Write the rows of cells that have no result."""
        for cell in cells:
            self.folder.append(cell.failed(problem, self.loaded, *self._where(cell)), (), ())


def _first(done: Sequence[Sequence[Outcome]], samples: Sequence[Sample]) -> int:
    """Return how many of the first samples all have; none where a task of a plugin has an order of its own."""
    first = min(map(len, done))
    in_order = [outcome.sample for outcome in done[0][:first]] == [sample.id for sample in samples[:first]]
    return first if in_order else 0


def _problem(error: Exception) -> str:
    """Say why a cell has no result; of what is no fault of a user, the error's type and where it came from."""
    text = " ".join(str(error).split())[:500]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return f"out of memory: {text}"
    if isinstance(error, UserError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if f"{os.sep}torch{os.sep}" not in frame.filename), frames[-1])
    return f"{type(error).__name__}: {text} ({Path(last.filename).name}, line {last.lineno})"
