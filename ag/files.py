"""The cache folder, and writing that survives a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def fsync(path: Path) -> None:
    """Wait until a file or folder is on disk.

    Raises:
        OSError: when the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path for a new file, which replaces ``target`` once it is on disk.

    After an error ``target`` is unchanged; a killed process may leave ``*.partial`` beside it.

    Raises:
        OSError: when the disk refuses.
    """
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        fsync(partial)
        partial.replace(target)
        fsync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def home() -> Path:
    """Return the cache folder of this library: AG_HOME, by default `ag` in the user's cache."""
    if chosen := os.environ.get("AG_HOME"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ag"
