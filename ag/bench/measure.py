"""Clocks, memory, quartiles and the description of the machine."""

from __future__ import annotations

import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.utils.import_utils import is_flash_attn_2_available

from ag.hardware import cpu_name

STATUS = Path("/proc/self/status")


def seconds_of(device: torch.device, step: Callable[[], object], times: int = 1) -> list[float]:
    """Run a step so many times and return the seconds of each; on a GPU by events, without waiting in between."""
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        torch.cuda.synchronize(device)
        for event in events[:-1]:
            event.record()
            step()
        events[-1].record()
        torch.cuda.synchronize(device)
        return [a.elapsed_time(b) / 1000 for a, b in zip(events[:-1], events[1:], strict=True)]
    marks = [time.perf_counter()]
    for _ in range(times):
        step()
        marks.append(time.perf_counter())
    return [b - a for a, b in zip(marks[:-1], marks[1:], strict=True)]


def call_seconds(device: torch.device, step: Callable[[], object], rounds: int) -> tuple[float, str]:
    """Return the median time of a call, and how it was timed.

    On a GPU it is ``graph``: a CUDA graph of many calls is replayed, so that the host does not count. What cannot be
    captured, and everything on a CPU, is timed as it is launched: ``launches``.
    """
    for _ in range(2):  # compiles and tunes
        step()
    if device.type == "cuda":
        try:
            from triton.testing import do_bench_cudagraph

            return do_bench_cudagraph(step, return_mode="median") / 1000, "graph"
        except (ImportError, RuntimeError):
            torch.cuda.synchronize(device)
    return statistics.median(seconds_of(device, step, rounds)), "launches"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the lower and upper quartile."""
    middle, low, high = np.quantile(values, [0.5, 0.25, 0.75]).tolist()
    return middle, low, high


def spread(column: str, seconds: Sequence[float], scale: float = 1) -> dict[str, float]:
    """Return the columns of times: their median under a name, and the quartiles, in units of ``1 / scale`` seconds."""
    median, low, high = quartiles(seconds)
    return {column: scale * median, "quartile 1": scale * low, "quartile 3": scale * high}


def drift(seconds: Sequence[float]) -> float:
    """Return the median of the last twentieth of the steps over that of the first one."""
    part = max(1, len(seconds) // 20)
    return statistics.median(seconds[-part:]) / statistics.median(seconds[:part])


def paired(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median, over rounds, of the quotient of times taken in the same round."""
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def forget_peak(device: torch.device) -> None:
    """Let :func:`peak_bytes` start anew; where the system cannot, the peak since the process began counts."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the most memory held: what torch allocated on a GPU, or the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def held_bytes(device: torch.device) -> int:
    """Return the memory held now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS")


def _status(name: str) -> int:
    if not STATUS.is_file():
        return 0
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def machine(device: torch.device) -> dict[str, Any]:
    """Describe where the numbers come from."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),  # of the last minute: others at work make times meaningless
        **gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "flash_attn": bool(is_flash_attn_2_available()),
    }
