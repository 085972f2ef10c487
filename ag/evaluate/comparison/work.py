"""Filling the missing cells of a comparison, beside other processes that do the same."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from rich.console import Console
from torch import nn

from ag.engine import EvictionCache
from ag.errors import UserError
from ag.evaluate.comparison.cells import Cell
from ag.evaluate.comparison.config import CompareConfig
from ag.evaluate.comparison.progress import Progressing
from ag.evaluate.comparison.results import Results, Row
from ag.evaluate.comparison.views import record
from ag.evaluate.tasks import Loaded, Outcome, Task
from ag.gates import export
from ag.model import base as models

POLL_SECONDS = 0.5


def fill(config: CompareConfig, cells: Sequence[Cell], results: Results, console: Console) -> dict[str, Row]:
    """Run the cells that have no row yet; a cell that another process works on is waited for.

    Returns:
        The row of every cell, by key.

    Raises:
        UserError: the model or a task's data cannot be had.
    """
    rows = results.rows()
    again = {key for key, row in rows.items() if config.retry and row.problem is not None}
    worker: _Worker | None = None
    told = False
    progress = Progressing(console, len(cells))
    with progress.shown():
        while missing := [cell for cell in cells if cell.key not in rows or cell.key in again]:
            progress.cells(len(cells) - len(missing))
            with ExitStack() as held:
                claimed: list[Cell] = []
                for cell in missing:
                    same_task = not claimed or cell.task == claimed[0].task
                    if len(claimed) < config.together and same_task and held.enter_context(results.claim(cell.key)):
                        claimed.append(cell)
                rows = results.rows()  # another process may have ended one between the look and the lock
                again &= {key for key, row in rows.items() if row.problem is not None}
                mine = [cell for cell in claimed if cell.key not in rows or cell.key in again]
                if mine:
                    worker = worker or _Worker(config, results)
                    worker.run(mine, progress)
                    again -= {cell.key for cell in mine}
                    rows = results.rows()
            if not claimed:
                if not told:
                    console.print(f"Waiting for {len(missing)} cells that other processes work on.")
                told = True
                time.sleep(POLL_SECONDS)
                rows = results.rows()
    return {cell.key: rows[cell.key] for cell in cells}


class _Worker:
    """The model, and the samples of the task at hand."""

    def __init__(self, config: CompareConfig, results: Results) -> None:
        self.config, self.results = config, results
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
        """Run cells of one task together; where that fails, one by one."""
        task = cells[0].task
        if task != self.task:
            self.task, self.loaded = task, task.load(self.tokenizer, self.config.samples, self.max_tokens)
        progress.begin(cells[0].name, len(cells), len(self.loaded.samples))
        try:
            self._run(cells, progress)
        except (UserError, RuntimeError, MemoryError) as error:
            progress.forget()
            problem = _problem(error)
            if len(cells) == 1:
                self.results.append(cells[0].failed(problem, self.loaded, self._prefill(cells[0])), (), ())
        else:
            return
        # outside of the handler: the error's traceback holds tensors
        torch.cuda.empty_cache()
        for cell in cells if len(cells) > 1 else ():
            self.run([cell], progress)

    def _run(self, cells: Sequence[Cell], progress: Progressing) -> None:
        samples = self.loaded.samples
        policies = [cell.policy.with_tokenizer(self.tokenizer) for cell in cells]
        if not samples:
            raise UserError(
                f"no sample can be run: {self.loaded.too_long} are longer than {self.max_tokens} tokens, "
                f"{self.loaded.too_short} are too short."
            )
        outcomes: list[list[Outcome]] = [[] for _ in cells]
        for index, outcome in cells[0].task.run(self.model, self.tokenizer, policies, samples):
            if not math.isfinite(outcome.score):
                raise UserError(f"sample {outcome.sample} has the score {outcome.score}.")
            outcomes[index].append(outcome)
            progress.outcome()
        shown = [sample for sample in samples if sample.prompt][: self.config.view_samples]
        views = record(self.model, self.tokenizer, policies, shown, self.config.view_tokens)
        for cell, mine, seen in zip(cells, outcomes, views, strict=True):
            row = cell.row(mine, self.loaded, self._prefill(cell))
            self.results.append(row, mine, seen)

    def _prefill(self, cell: Cell) -> str:
        return EvictionCache(self.model, cell.policy).prompt_sees


def _problem(error: Exception) -> str:
    """Say in a row why a cell has no result.

    Raises:
        Exception: the error itself, when it is none of memory or of the policy.
    """
    memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
    if not memory and not isinstance(error, UserError):
        raise error
    text = " ".join(str(error).split())[:500]
    return f"out of memory: {text}" if memory else text
