"""Where the library keeps its files, and writing that survives a crash."""

from __future__ import annotations

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk.

    Raises:
        OSError: when the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def home() -> Path:
    """Return the cache folder of this library: AG_HOME, by default `ag` in the user's cache."""
    if chosen := os.environ.get("AG_HOME"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ag"
