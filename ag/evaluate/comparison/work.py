"""Runs the missing cells of a comparison, in this process or on a cluster."""

from __future__ import annotations

import math
import numbers
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import nn

from ag import cluster
from ag.commands.compare import CompareConfig
from ag.engine.cache_setup import CacheSetup
from ag.errors import UserError
from ag.evaluate.comparison.cells import NO_SAMPLES, Cell
from ag.evaluate.comparison.folder import FinishedCell, Folder, FolderError, common_samples
from ag.evaluate.inside import KeptTokens, record_kept_tokens
from ag.evaluate.tasks import Outcome, Sample, Task
from ag.gates import export
from ag.model import base as models
from ag.plugins import load

MEMORY_BY_WEIGHTS = 2  # main memory of a process on a cluster, in multiples of the stored weights of the model
SECONDS = 30.0  # between two lines of progress without a terminal


def run_missing_cells(
    config: CompareConfig, cells: Sequence[Cell], folder: Folder, console: Console, command: str = ""
) -> dict[str, FinishedCell]:
    """Run the cells without a result, here or on a cluster, and write the results. No command: the Python call.

    If the samples of a task have changed since an earlier command, its cells of that command run again.

    Returns all cells of the folder by key, including cells of earlier commands.

    Raises:
        UserError: the model or a task's data cannot be read, the samples of a task change from cell to cell, or
            another process writes into the folder.
        KeyboardInterrupt: on Ctrl-C; the message names the number of finished cells.
    """
    command = command or python_call(config)
    with folder.writing():
        finished = folder.read()
        retried = {key for key, cell in finished.items() if config.retry and cell.summary.problem is not None}
        missing = [cell for cell in cells if cell.key in retried or cell.key not in finished]
        num_finished = len(cells) - len(missing)
        progress = ComparisonProgress(console, len(cells), num_finished)
        try:
            with progress.bar:
                progress.cells(num_finished)
                already_repeated = False
                while missing:
                    for finished_together in _run_cells(config, missing, command, progress, folder):
                        for cell in finished_together:
                            folder.append(cell)
                            finished[cell.summary.key] = cell
                            num_finished += 1
                        progress.cells(num_finished)  # once: cells of one pass end together
                    missing = _outdated(cells, finished, missing)
                    num_finished -= len(missing)
                    if missing:
                        names = ", ".join(cell.name for cell in missing)
                        if already_repeated:
                            raise UserError(
                                f"{missing[0].task.name}: its samples were not the same in each cell, and not when "
                                f"these were measured again: {names}; expected a task that yields every sample for "
                                "each policy, and reads equal samples each time."
                            )
                        already_repeated = True
                        console.print(f"The data has changed since these results, which are measured again: {names}")
            for asked in cells:  # an earlier command may have given a policy another label
                named = finished[asked.key].renamed(label=asked.label, policy=repr(asked.policy))
                if named != finished[asked.key]:
                    finished[asked.key] = named
                    folder.append(named)
        except KeyboardInterrupt:
            state = f"{num_finished} of {len(cells)} cells are in {folder.path}"
            raise KeyboardInterrupt(f"{state}; the same command goes on from there") from None
    return finished


def _outdated(cells: Sequence[Cell], finished: Mapping[str, FinishedCell], newest: Sequence[Cell]) -> list[Cell]:
    """Return the cells whose samples are not those of their task's last measured cell among the ``newest``."""
    measured = [cell for cell in newest if finished[cell.key].outcomes]
    newest_by_task = {cell.task.name: finished[cell.key].outcomes for cell in measured}
    outdated = []
    for cell in cells:
        outcomes, newest_outcomes = finished[cell.key].outcomes, newest_by_task.get(cell.task.name, [])
        if outcomes and newest_outcomes:
            longest = max(len(outcomes), len(newest_outcomes))
            if len(common_samples(outcomes, newest_outcomes)) < longest:
                outdated.append(cell)
    return outdated


def _run_cells(
    config: CompareConfig, cells: Sequence[Cell], command: str, progress: ComparisonProgress, folder: Folder
) -> Iterator[list[FinishedCell]]:
    """Run cells, and yield the finished cells of each pass together."""
    if not cells:  # needs neither a model nor a cluster
        return
    max_cells, by_task = config.batch_policies, [[*group] for _, group in groupby(cells, lambda cell: cell.task)]
    units = [group[first : first + max_cells] for group in by_task for first in range(0, len(group), max_cells)]
    if config.cluster is None:
        worker = Worker(config, command, progress, folder)
        for unit in units:
            yield from worker.run(unit)
        return
    memory = MEMORY_BY_WEIGHTS * models.stored_nbytes(config.model, config.revision)
    room = cluster.Resources.on(config.device, cpus=torch.get_num_threads(), memory=memory)
    with cluster.connected(config.cluster):
        make = partial(_remote, config, command, torch.get_num_threads())
        for unit, finished in cluster.share(units, make, room):
            if isinstance(finished, cluster.LostUnit):
                problem = f"{finished.times} workers ended while they worked on it: {finished.why}"
                finished = [cell.finished(config, command, problem=problem) for cell in unit]
            yield finished


def _remote(config: CompareConfig, command: str, threads: int) -> Callable[[list[Cell]], list[FinishedCell]]:
    """Make a worker in a process of a cluster, with the calling process's number of threads, for equal sums."""
    torch.set_num_threads(threads)
    load(config.plugins)
    worker = Worker(config, command)
    return lambda unit: [finished for together in worker.run(unit) for finished in together]


class Worker:
    """The model, which raises ``UserError`` if it cannot be loaded, and the samples of the current task.

    With a ``folder`` each outcome is written there, and a cell goes on after the samples of a killed process.
    """

    def __init__(
        self,
        config: CompareConfig,
        command: str,
        progress: ComparisonProgress | None = None,
        folder: Folder | None = None,
    ) -> None:
        self.config, self.command, self.folder = config, command, folder
        self.progress = ComparisonProgress(Console(quiet=True)) if progress is None else progress
        torch.set_float32_matmul_precision("highest")  # no TF32: differences between policies are small
        torch.manual_seed(config.seed)
        base, self.tokenizer = models.load_base(config.base, config.device)
        self.model: nn.Module = base if config.adapter is None else export.load_adapter(base, config.adapter)
        self.model.eval()
        context = int(base.config.get_text_config().max_position_embeddings)
        self.max_tokens = min(context, config.max_tokens or context)
        self.task: Task | None = None
        self.loaded = NO_SAMPLES
        self.content_hashes: dict[str, str] = {}

    def run(
        self, cells: Sequence[Cell], outcomes_by_cell: Sequence[list[Outcome]] = (), waiting: int = 0
    ) -> Iterator[list[FinishedCell]]:
        """Run cells of one task together, and yield lists of cells that finish together.

        If that fails, they run one by one on the samples without an outcome, while ``waiting`` counts the outcomes of
        the cells after these. Raises ``UserError`` if the task's data cannot be read, or the folder not be written to.
        """
        try:
            if cells[0].task != self.task:
                self.task, self.loaded = None, NO_SAMPLES
                self.loaded = cells[0].task.load(self.tokenizer, self.config.samples, self.max_tokens)
                self.content_hashes = {sample.id: sample.content_hash for sample in self.loaded.samples}
                _check_ids(cells[0].task, self.loaded.samples)
                self.task = cells[0].task
        except UserError:
            raise
        except Exception as error:  # a task of a plugin may raise anything
            yield [self._finish(cell, _problem(error)) for cell in cells]
            return
        outcomes_by_cell = outcomes_by_cell or [[] for _ in cells]
        try:
            yield self._run(cells, outcomes_by_cell, waiting)
            return
        except FolderError:  # of the disk, not of the cells
            raise
        except Exception as error:  # a part of a plugin may raise anything
            problem = _problem(error)
        torch.cuda.empty_cache()  # the error is freed, and the tensors of its traceback
        if len(cells) == 1:
            yield [self._finish(cells[0], problem)]
            return
        for index, (cell, outcomes) in enumerate(zip(cells, outcomes_by_cell, strict=True), 1):
            yield from self.run([cell], [outcomes], waiting=sum(map(len, outcomes_by_cell[index:])))

    def _run(
        self, cells: Sequence[Cell], outcomes_by_cell: Sequence[list[Outcome]], waiting: int
    ) -> list[FinishedCell]:
        """Run cells of one task, each on the samples without an outcome; outcomes are appended."""
        samples = self.loaded.samples
        batch = getattr(cells[0].task, "batch", 1)
        self.progress.begin(cells[0].name, len(cells), len(samples), waiting, batch)
        refused = [cell for cell in cells if 0 < cell.untouched(samples, self.prefill(cell)) == len(samples)]
        run = [pair for pair in zip(cells, outcomes_by_cell, strict=True) if pair[0] not in refused]
        run_cells, run_outcomes = [cell for cell, _ in run], [cell_outcomes for _, cell_outcomes in run]
        policies = [cell.policy.with_tokenizer(self.tokenizer) for cell in run_cells]
        if not samples:
            num_too_long, num_too_short = self.loaded.too_long, self.loaded.too_short
            raise UserError(
                f"no sample can be run: {num_too_long} are longer than {self.max_tokens} tokens, "
                f"{num_too_short} are too short."
            )
        # only the first attempt continues an earlier command; later ones have the outcomes of the first
        is_first_attempt = self.folder is not None and not any(run_outcomes)
        for cell, cell_outcomes in zip(run_cells, run_outcomes, strict=True):
            if self.folder is not None and is_first_attempt:
                cell_outcomes += self.folder.unfinished(cell.key)
            num_valid = _num_valid(cell_outcomes, self.content_hashes)
            if num_valid < len(samples):  # the solutions of a batch depend on each other: it is run as a whole
                num_valid -= num_valid % batch
            del cell_outcomes[num_valid:]
            if self.folder is not None:
                self.folder.begin(cell.key, cell_outcomes)
        counts = [len(cell_outcomes) for cell_outcomes in run_outcomes]
        self.progress.outcome(sum(counts), of_earlier_command=is_first_attempt)
        # cells with fewer outcomes run alone until they have caught up with the others
        for first, end in pairwise(sorted({*counts, len(samples)})):
            behind = [index for index, count in enumerate(counts) if count <= first]
            batch_policies = [policies[index] for index in behind]
            for index, outcome in cells[0].task.run(self.model, self.tokenizer, batch_policies, samples[first:end]):
                self._add(run_cells[behind[index]], outcome, run_outcomes[behind[index]])
        shown = [sample for sample in samples if sample.prompt][: self.config.view_samples]
        views = record_kept_tokens(self.model, self.tokenizer, policies, shown, self.config.view_tokens)
        results = zip(run_cells, run_outcomes, views, strict=True)
        finished = [self._finish(cell, None, outcomes, cell_views) for cell, outcomes, cell_views in results]
        return finished + [self._finish(cell, cell.refusal()) for cell in refused]

    def _add(self, cell: Cell, outcome: Outcome, outcomes: list[Outcome]) -> None:
        """Append an outcome to those of its cell, here and in the folder; ``UserError``: it cannot be written there."""
        score = _plain(outcome.sample, "score", outcome.score)
        if isinstance(score, str):
            raise UserError(f"sample {outcome.sample} has the score {score!r}: expected a number.")
        tags = {name: _plain(outcome.sample, name, value) for name, value in outcome.tags.items()}
        content_hash = self.content_hashes.get(outcome.sample, "")
        outcomes.append(replace(outcome, score=score, tags=tags, content_hash=content_hash))
        if self.folder is not None:
            self.folder.add(cell.key, outcomes[-1])
        self.progress.outcome()

    def _finish(
        self, cell: Cell, problem: str | None, outcomes: Sequence[Outcome] = (), views: Sequence[KeptTokens] = ()
    ) -> FinishedCell:
        try:
            prefill = self.prefill(cell)
        except Exception:  # perhaps the reason why the cell failed
            prefill = ""
        return cell.finished(self.config, self.command, self.loaded, prefill, problem, outcomes, views)

    def prefill(self, cell: Cell) -> str:
        """Return which tokens later tokens of a prompt see; see :class:`Summary`."""
        return CacheSetup.of(self.model, cell.policy, None).prompt_sees


class ComparisonProgress:
    """A bar on a terminal, else a line every half minute: cells, samples, and an estimate of the time left.

    ``num_finished`` of the ``total`` cells were finished by earlier commands; the estimate is from the others.
    """

    def __init__(
        self, console: Console, total: int = 0, num_finished: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._total, self._clock = console, total, clock
        self._begun = self._last = clock()
        self._num_finished, self._finished_before = num_finished, float(num_finished)
        self.begin("cells", 1, 0)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=16), TextColumn("{task.fields[numbers]}"))
        #: A context that shows the bar on a terminal.
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self.bar.add_task(self._name, total=total, numbers="")

    def cells(self, num_finished: int) -> None:
        """Set the number of finished cells, once for all cells that ran together. No cell runs then."""
        self._num_finished, self._outcomes = num_finished, 0
        self._show()

    def begin(self, name: str, together: int, samples: int, waiting: int = 0, batch: int = 1) -> None:
        """Begin cells that run together, by the name of the first; :meth:`outcome` shows them.

        ``waiting`` counts the finished samples of cells that run later. The outcomes of a ``batch`` come at once.
        """
        self._name = name + (f" and {together - 1} more" if together > 1 else "")
        self._together, self._samples, self._outcomes, self._waiting = together, samples, 0, waiting
        self._batch = batch

    def outcome(self, samples: int = 1, of_earlier_command: bool = False) -> None:
        """Add finished samples of one cell; those of an earlier command say nothing about time."""
        self._outcomes += samples
        if of_earlier_command and samples:
            self._finished_before += samples / self._samples
        if self._outcomes % self._batch == 0:  # within a batch the estimate would take its time for one sample's
            self._show()

    def progress_text(self) -> str:
        """Return the numbers and the estimate as text."""
        parts = [f"{self._num_finished} of {self._total} cells"]
        if self._outcomes:
            parts.append(f"{self._outcomes // self._together} of {self._samples} samples")
        run = self._completed - self._finished_before
        # cells that run together yield their results together: before each has one, nothing is known about time
        if run > 0 and run * self._samples >= (self._together if self._samples else 0):
            left = (self._total - self._completed) * (self._clock() - self._begun) / run
            parts.append(f"about {timedelta(seconds=round(left))} left")
        return ", ".join(parts)

    @property
    def _completed(self) -> float:
        """The finished cells, and the finished part of the running cells."""
        return self._num_finished + ((self._outcomes + self._waiting) / self._samples if self._samples else 0.0)

    def _show(self) -> None:
        text = self.progress_text()
        if self._console.is_terminal:
            self.bar.update(self._task, completed=self._completed, description=self._name, numbers=text)
        elif self._clock() - self._last >= SECONDS:
            self._last = self._clock()
            self._console.print(f"{text} ({self._name})", soft_wrap=True, highlight=False)


def _check_ids(task: Task, samples: Sequence[Sample]) -> None:
    """Refuse samples of a plugin with one id: policies are paired by it."""
    counts = Counter(sample.id for sample in samples)
    for name, count in counts.items():
        if count > 1:
            raise UserError(f"task {task.name}: {count} samples have the id {name!r}: expected one each.")


def _plain(sample: str, name: str, value: Any) -> float | str:
    """Return a score or a tag as a number or a text that JSON has and results are read with.

    Raises:
        UserError: it is neither, or it is not finite.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, numbers.Real):
        raise UserError(f"sample {sample} has the {name} {value!r:.80}: expected a number or a text.")
    if not math.isfinite(value):
        raise UserError(f"sample {sample} has the {name} {value}: expected a finite number; try dtype=float32.")
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else float(value)


def _num_valid(outcomes: Sequence[Outcome], content_hashes: Mapping[str, str]) -> int:
    """Return how many first outcomes are those of the first samples, by their ids in order and their contents."""
    pairs = zip(outcomes, content_hashes.items(), strict=False)
    return len([*takewhile(lambda pair: (pair[0].sample, pair[0].content_hash) == pair[1], pairs)])


def _problem(error: Exception) -> str:
    """Return why a cell failed. An error that is not a ``UserError`` also has its type, file and line."""
    text = " ".join(str(error).split())[:500]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return f"out of memory: {text}"
    if isinstance(error, UserError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if f"{os.sep}torch{os.sep}" not in frame.filename), frames[-1])
    return f"{type(error).__name__}: {text} ({Path(last.filename).name}, line {last.lineno})"


def python_call(config: CompareConfig) -> str:
    """Return the Python call of a comparison, with the settings that differ from the defaults."""
    defaults, values = vars(CompareConfig()), vars(config)
    settings = [f"{name}={value!r}" for name, value in values.items() if value != defaults[name]]
    return f"compare(CompareConfig({', '.join(settings)}), console)"
