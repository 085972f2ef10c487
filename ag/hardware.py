"""The processor, for files of results."""

from __future__ import annotations

import platform
from pathlib import Path

CPU = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """Return the name of the processor's model."""
    lines = CPU.read_text().splitlines() if CPU.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
