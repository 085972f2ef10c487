"""Many runs of a program, one process each; several workers may share them.

``AG_TASK=i/n`` (i from 0), or being a task of a SLURM array, gives a worker its part. It starts the i-th part of the
runs first, then runs that no other worker has started. A run in progress is locked by ``flock``; the operating system
releases the lock when the last process that holds it ends, however it ends.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ag.config.keys import ConfigError

METRICS = ("val/loss", "val/lm_loss", "val/accuracy", "val/evicted")  # of a run, where its metrics.csv has them
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Share:
    """The state of a sweep that several workers share: which runs are done, and which are in progress.

    Args:
        folder: the same for all workers: one lock and one record for each run.
        part: number of this worker.
        parts: number of workers.
    """

    def __init__(self, folder: Path, part: int, parts: int) -> None:
        self.folder, self.part, self.parts = folder, part, parts
        folder.mkdir(parents=True, exist_ok=True)

    def order(self, runs: int) -> list[int]:
        """Return all runs, this worker's part first."""
        first = self.part * runs // self.parts
        return [*range(first, runs), *range(first)]

    def take(self, index: int) -> int | None:
        """Lock a run; returns the descriptor that holds it, None when it is done or in progress elsewhere."""
        lock = os.open(self.folder / f"{index:04d}.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        if self._record(index).exists():
            os.close(lock)
            return None
        return lock

    def leave(self, index: int, lock: int, code: int) -> None:
        """Unlock a run, and record it when it succeeded; the next worker tries a failed one again."""
        if code == 0:
            self._record(index).write_text("done\n")
        os.close(lock)

    def run_name(self, index: int) -> str:
        """Name the run folder of a run, the same for every worker that tries it."""
        return f"sweep-{self.folder.name}-{index:04d}"

    def _record(self, index: int) -> Path:
        return self.folder / f"{index:04d}.done"


def share(runs: Sequence[dict[str, str]], program: str, output: str) -> Share | None:
    """Return this worker's view of a shared sweep, None when the sweep is not shared.

    Args:
        runs: the overrides of each run.
        program: name of the program.
        output: folder of the run folders.

    Raises:
        ConfigError: when ``AG_TASK`` is not ``i/n``.
    """
    if text := os.environ.get("AG_TASK"):
        part, slash, parts = text.partition("/")
        if not (slash and part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
            raise ConfigError(f"AG_TASK={text}: expected i/n, such as 0/4 for the first of four workers")
        place = int(part), int(parts)
    elif "SLURM_ARRAY_TASK_ID" in os.environ:
        first, last = (int(os.environ.get(f"SLURM_ARRAY_TASK_{end}", 0)) for end in ("MIN", "MAX"))
        task = int(os.environ["SLURM_ARRAY_TASK_ID"])
        step = int(os.environ.get("SLURM_ARRAY_TASK_STEP", 1))
        place = (task - first) // step, max((last - first) // step + 1, (task - first) // step + 1)
    else:
        return None
    key = hashlib.sha256(json.dumps([program, *runs]).encode()).hexdigest()[:12]
    return Share(Path(output) / "sweeps" / key, *place)


def sweep(runs: list[dict[str, str]], configs: Sequence[Any], program: str, options: list[str]) -> int:
    """Run each combination in a process of its own, one after the other, then print a table.

    SIGINT, SIGTERM and SIGUSR1 are passed on to the current process, which may save a checkpoint, and end the sweep
    after it.

    Args:
        runs: the overrides of each run.
        configs: the configuration of each run; ``output`` and ``recipe`` are read where they exist.
        program: name for ``python -m``.
        options: handed on to each run.

    Returns:
        0, 1 when a run failed, or 128 + the number of the signal that ended the sweep.
    """
    rows: list[list[str]] = []
    failed = signalled = 0
    process: subprocess.Popen[bytes] | None = None
    begun = time.strftime("%Y-%m-%d_%H-%M-%S")
    shared = share(runs, program, getattr(configs[0], "output", "runs"))

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal signalled
        signalled = number
        if number != signal.SIGINT and process is not None:  # a terminal sends SIGINT to both
            process.send_signal(number)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    for index in range(len(runs)) if shared is None else shared.order(len(runs)):
        if signalled:
            break
        words = [f"{name}={text}" for name, text in runs[index].items()]
        lock = None if shared is None else shared.take(index)
        if shared is not None and lock is None:
            continue
        print(f"[{index + 1}/{len(runs)}] {shlex.join(words)}", flush=True)
        start = time.monotonic()
        command, environment = [sys.executable, "-m", program, *options, *words], dict(os.environ)
        if shared is not None and lock is not None:
            environment["AG_RUN"] = shared.run_name(index)
            command += _begun(configs[index], environment["AG_RUN"])
        elif hasattr(configs[index], "resume"):
            environment["AG_RUN"] = f"{begun}-{index + 1}"
        folder = _folder(configs[index], environment.get("AG_RUN", ""))
        # the process holds the lock too: it may outlive its worker
        process = subprocess.Popen(command, env=environment, pass_fds=() if lock is None else (lock,))
        code = process.wait()
        if shared is not None and lock is not None:
            shared.leave(index, lock, code)
        failed += code != 0
        result, seconds = f"exit {code}" if code else "ok", time.monotonic() - start
        measured = _measured(folder) if folder else {}
        numbers = [measured.get(name, "") for name in METRICS]
        rows.append([f"{index + 1}", result, f"{seconds:.0f}", *numbers, str(folder or ""), shlex.join(words)])
    for number, handler in before.items():
        signal.signal(number, handler)
    print("", *_table(["run", "result", "seconds", *METRICS, "folder", "overrides"], rows), sep="\n")
    return 128 + signalled if signalled else int(failed > 0)


def _folder(config: Any, name: str) -> Path | None:
    """Return where a run writes, None for a program that names no folder."""
    if hasattr(config, "resume"):
        return Path(config.resume) if config.resume else Path(config.output) / config.recipe / name
    output = getattr(config, "output", None)
    return Path(output) if output else None


def _measured(folder: Path) -> dict[str, str]:
    """Return the last value of each metric of a run, as texts."""
    try:
        with (folder / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError:
        return {}
    return {name: f"{float(row[name]):.4f}" for row in rows for name in METRICS if row.get(name)}


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Align columns, numbers to the right; columns of which nothing is known are left out."""
    shown = [i for i in range(len(head)) if i < 2 or any(row[i] for row in rows)]
    lines = [[row[i] for i in shown] for row in [head, *rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(shown))]
    numbers = {i for i, name in enumerate(head[i] for i in shown) if name in ("run", "seconds", *METRICS)}
    return [
        " "
        + "  ".join(
            f"{cell:>{w}}" if i in numbers else f"{cell:<{w}}"
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _begun(config: Any, name: str) -> list[str]:
    """Return the arguments that continue an earlier worker's run; its folder is renamed when it has no checkpoint."""
    if not hasattr(config, "resume"):
        return []
    folder = Path(config.output) / config.recipe / name
    if any((folder / "checkpoints").glob("step=*.ckpt")):
        return [f"resume={folder}"]
    if folder.exists():
        folder.rename(folder.with_name(f"{name}.{time.time_ns()}"))
    return []
