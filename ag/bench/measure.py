"""Times, memory, quartiles and the description of the machine."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.utils.import_utils import is_flash_attn_2_available

from ag.errors import UserError
from ag.hardware import cpu_name

PROCESS = Path("/proc/self")  # Linux reports the peak of a process there


def seconds_of(device: torch.device, step: Callable[[], object], times: int = 1) -> list[float]:
    """Run a step several times and return the seconds of each. A GPU is timed by events, without waiting."""
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        torch.cuda.synchronize(device)
        stream = torch.cuda.current_stream(device)
        for event in events[:-1]:
            event.record(stream)
            step()
        events[-1].record(stream)
        torch.cuda.synchronize(device)
        return [a.elapsed_time(b) / 1000 for a, b in zip(events[:-1], events[1:], strict=True)]
    marks = [time.perf_counter()]
    for _ in range(times):
        step()
        marks.append(time.perf_counter())
    return [b - a for a, b in zip(marks[:-1], marks[1:], strict=True)]


def spread(column: str, seconds: Sequence[float], scale: float = 1) -> dict[str, float]:
    """Return the median of times, as ``column``, and their quartiles, in units of ``1 / scale`` seconds."""
    values = (scale * np.quantile(seconds, [0.5, 0.25, 0.75])).tolist()
    return dict(zip((column, "quartile 1", "quartile 3"), values, strict=True))


def late_over_early(seconds: Sequence[float]) -> float:
    """Return the median time of the last twentieth of the steps over the median of the first twentieth."""
    part = max(1, len(seconds) // 20)
    return statistics.median(seconds[-part:]) / statistics.median(seconds[:part])


def median_ratio(seconds: Sequence[float] | None, other_seconds: Sequence[float] | None) -> float | None:
    """Return the median over rounds of ``seconds / other_seconds``. None: there are no times on one side."""
    if seconds is None or other_seconds is None:
        return None
    return statistics.median(a / b for a, b in zip(seconds, other_seconds, strict=True))


def trim_memory() -> None:
    """Return freed memory to the system, so that tensors made later do not hide in it. Only glibc can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def forget_peak(device: torch.device) -> None:
    """Reset :func:`peak_bytes`. If the system cannot, it returns the peak since the process began."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            (PROCESS / "clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the peak of torch's memory on a GPU, or else of the process's resident memory."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def used_bytes(device: torch.device) -> int:
    """Return the memory in use."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS")


def machine(device: torch.device) -> dict[str, Any]:
    """Return the hardware and the versions."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),  # of the last minute; other processes make times meaningless
        **gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "flash_attn": bool(is_flash_attn_2_available()),
    }


def _status(name: str) -> int:
    if not PROCESS.is_dir():
        raise UserError(f"train, memory: the memory of a process is read in {PROCESS}, which only Linux has.")
    lines = (PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
