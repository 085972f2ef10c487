"""How long parts of a pass take, on a CPU and on a card, which works behind the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

OPEN = 64  # most parts whose time is not yet known


class Stopwatch:
    """Adds up the seconds of parts of a pass.

    On a card they are those between two events in its stream. Nothing waits for the newest of these until the sum is
    asked for.

    Args:
        seconds: that the sum begins with.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._sum = seconds
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Count the time of what runs within, on a device."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._sum += time.perf_counter() - start
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():  # a graph measures nothing
            yield
            return
        stream = torch.cuda.current_stream(device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        yield
        last.record(stream)
        self._open.append((first, last))
        while len(self._open) > OPEN or (self._open and self._open[0][1].query()):  # nothing waits but for an old one
            self._close()

    @property
    def seconds(self) -> float:
        """The sum; on a card the host waits for the parts that have not ended."""
        while self._open:
            self._close()
        return self._sum

    def _close(self) -> None:
        """Add the oldest part, for whose end the host waits."""
        first, last = self._open.pop(0)
        last.synchronize()
        self._sum += first.elapsed_time(last) / 1000

    def __deepcopy__(self, memo: object) -> Stopwatch:
        """Copy the sum: events belong to one watch."""
        return Stopwatch(self.seconds)
