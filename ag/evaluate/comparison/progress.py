"""How far a comparison is: a bar on a terminal, elsewhere a line every half minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

SECONDS = 30.0  # between two lines where there is no terminal


class Progressing:
    """Cells, the samples of those at work, and the time that the rest will take.

    The time is that of the cells that this process has run so far, cells of other tasks taken as equal.
    """

    def __init__(self, console: Console, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._total, self._clock = console, total, clock
        self._begun = self._last = clock()
        self._first: float | None = None  # cells that were there at the start
        self._done = 0.0
        self._name, self._samples, self._outcomes, self._together = "cells", 0, 0, 1
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=16), TextColumn("{task.fields[said]}"))
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task(self._name, total=total, said="")

    def shown(self) -> AbstractContextManager[object]:
        """Return the context in which a terminal shows it."""
        return self._bar if self._console.is_terminal else nullcontext()

    def cells(self, done: float) -> None:
        """Set how many cells have a row; those at work are among them then, or begin anew."""
        self._first = done if self._first is None else self._first
        self._done, self._outcomes, self._samples = done, 0, 0
        self._show()

    def begin(self, name: str, together: int, samples: int) -> None:
        """Begin with a number of cells that run together, and the samples of their task."""
        more = f" and {together - 1} more" if together > 1 else ""
        self._name, self._together, self._samples, self._outcomes = name + more, together, samples, 0
        self._show()

    def outcome(self, samples: int = 1) -> None:
        """Count samples of one cell."""
        self._outcomes += samples
        self._show()

    def said(self) -> str:
        """Return the numbers in words."""
        parts = [f"{int(self._done)} of {self._total} cells"]
        if self._samples:
            parts.append(f"{self._outcomes // self._together} of {self._samples} samples")
        first = self._first or 0
        done = self._with_work()
        # results of samples that run together come together, so that the first of them says nothing about time
        if done > first and (self._outcomes >= self._together or self._done > first):
            left = (self._total - done) * (self._clock() - self._begun) / (done - first)
            parts.append(f"about {timedelta(seconds=round(left))} left")
        return ", ".join(parts)

    def _with_work(self) -> float:
        """Return the cells that are done, with what is done of those at work."""
        return self._done + (self._outcomes / self._samples if self._samples else 0.0)

    def _show(self) -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._with_work(), description=self._name, said=self.said())
        elif self._clock() - self._last >= SECONDS:
            self._last = self._clock()
            self._console.print(f"{self.said()} ({self._name})", soft_wrap=True, highlight=False)
