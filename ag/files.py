"""The cache folder, checksums of files, writing that survives a crash or another process, and metrics.csv."""

from __future__ import annotations

import csv
import functools
import hashlib
import itertools
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ag.errors import UserError

LOCK = "lock"  # the writer of a folder locks this file in it; the lock ends with the process


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

    Two processes, also of two machines, have different paths. After an error ``target`` is unchanged; a killed process
    may leave ``*.partial`` beside it.

    Raises:
        OSError: when the disk refuses.
    """
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        fsync(partial)
        partial.replace(target)
        fsync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, refusal: str, wait: float = 0) -> Iterator[None]:
    """Lock a folder for this process.

    Args:
        folder: an existing folder, which gets a file ``lock``.
        refusal: message of the error.
        wait: seconds to wait for another process to end.

    Raises:
        UserError: another process has locked it.
    """
    lock = FileLock(folder / LOCK, timeout=wait)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(refusal) from None
    try:
        yield
    finally:
        lock.release()


def file_names(names: Iterable[str]) -> list[str]:
    """Return a file name without an ending for each name. A file name that is taken gets the next free number."""
    unique_names: list[str] = []
    for name in names:
        plain = re.sub(r"[^\w.+@-]+", "_", name)
        numbered = (f"{plain}_{number}" for number in itertools.count(2))
        unique_names.append(next(x for x in itertools.chain([plain], numbered) if x not in unique_names))
    return unique_names


def checksum(file: Path) -> str:
    """Return the SHA-256 of a file. The file is read again only if its size or time has changed.

    Raises:
        OSError: the file cannot be read.
    """
    state = file.stat()
    return _checksum(file, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _checksum(file: Path, size: int, modified: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def home() -> Path:
    """Return the cache folder of this library: AG_HOME, by default `ag` in the user's cache."""
    if chosen := os.environ.get("AG_HOME"):
        return Path(os.path.expanduser(chosen))
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ag"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read a `metrics.csv` as one dictionary a row, without empty cells and without an unfinished last line."""
    if not path.exists():
        return []
    text = path.read_text()
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [{name: _number(cell) for name, cell in row.items() if cell} for row in rows]


def _number(cell: str) -> float:
    return int(cell) if cell.isdigit() else float(cell)
