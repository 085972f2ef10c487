"""Seconds that parts of a pass take, on a CPU and on a card, which works later than the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

OPEN = 64  # most parts whose time is not read yet


class Stopwatch:
    """Adds up the seconds of parts of a pass.

    On a card they are the time between two events in its stream. The host reads them with the sum, or after 64 more.

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
        if len(self._open) > OPEN:
            self._read(1)

    @property
    def seconds(self) -> float:
        """Total seconds; on a card the host waits for unfinished parts."""
        self._read(len(self._open))
        return self._sum

    def _read(self, count: int) -> None:
        """Add the oldest parts, for whose ends the host waits."""
        for first, last in self._open[:count]:
            last.synchronize()
            self._sum += first.elapsed_time(last) / 1000
        del self._open[:count]

    def __deepcopy__(self, memo: object) -> Stopwatch:
        """Copy the sum: events belong to one watch."""
        return Stopwatch(self.seconds)
