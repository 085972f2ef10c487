"""The processor and the main memory of this machine, and the memory of some cards."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import NamedTuple

CPU = Path("/proc/cpuinfo")
LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"  # of a container
#: Memory of some cards in GiB, by their names.
CARDS = {"3090": 24, "4090": 24, "5090": 32, "a100": 80, "a100-40": 40, "a6000": 48, "h100": 80, "h200": 141}
CARDS |= {"l4": 24, "l40s": 48, "t4": 16, "v100": 32}


class Card(NamedTuple):
    """A GPU that a run is planned for."""

    name: str
    gib: float  # its memory


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


def lacks_bfloat16() -> bool:
    """Return whether the processor names its instruction sets, and has none for bfloat16."""
    features = cpu_features()
    return bool(features) and not features & {"avx512_bf16", "amx_bf16", "bf16"}


def main_memory() -> int:
    """Return the bytes of main memory that this process may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # without a limit there is no file, or it says "max"
            limits.append(int(Path(file).read_text()))
    return min(limits)
