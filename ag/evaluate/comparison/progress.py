"""The progress of a comparison: a bar on a terminal, else a line every half minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

SECONDS = 30.0  # between two lines without a terminal


class ComparisonProgress:
    """Counts cells and samples, and estimates the time left from the cells that this process has run.

    ``num_finished`` of the ``total`` cells were finished by earlier commands.
    """

    def __init__(
        self, console: Console, total: int, num_finished: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._total, self._clock = console, total, clock
        self._begun = self._last = clock()
        self._finished_before = self._num_finished = num_finished
        self.begin("cells", 1, 0)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=16), TextColumn("{task.fields[numbers]}"))
        #: A context that shows the bar on a terminal.
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self.bar.add_task(self._name, total=total, numbers="")

    def cells(self, num_finished: int) -> None:
        """Set the number of finished cells, once for all cells that ran together. No cell runs then."""
        self._num_finished, self._outcomes = num_finished, 0
        self._show()

    def begin(self, name: str, together: int, samples: int, waiting: int = 0) -> None:
        """Begin cells that run together. :meth:`outcome` shows them, with the samples that are already done.

        Args:
            name: name of the first cell.
            together: number of the cells.
            samples: number of samples of their task.
            waiting: finished samples of cells that run later.
        """
        self._name = name + (f" and {together - 1} more" if together > 1 else "")
        self._together, self._samples, self._outcomes, self._waiting = together, samples, 0, waiting

    def outcome(self, samples: int = 1) -> None:
        """Add finished samples of one cell."""
        self._outcomes += samples
        self._show()

    def progress_text(self) -> str:
        """Return the numbers and the estimate as text."""
        parts = [f"{self._num_finished} of {self._total} cells"]
        if self._outcomes:
            parts.append(f"{self._outcomes // self._together} of {self._samples} samples")
        run = self._completed - self._finished_before
        # cells that run together yield their results together: the first result says nothing about time
        if run > 0 and (self._outcomes >= self._together or self._num_finished > self._finished_before):
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
