"""The processor and the main memory of this machine."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

CPU = Path("/proc/cpuinfo")
LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"  # of a container


def cpu_name() -> str:
    """Return the name of the processor's model."""
    lines = CPU.read_text().splitlines() if CPU.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cpu_features() -> set[str]:
    """Return the processor's instruction sets by their names in Linux; empty if it does not name them."""
    lines = CPU.read_text().splitlines() if CPU.is_file() else []
    listed = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return set(next(listed, "").split())


def main_memory() -> int:
    """Return the bytes of main memory that this process may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # without a limit there is no file, or it says "max"
            limits.append(int(Path(file).read_text()))
    return min(limits)
