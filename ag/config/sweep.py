"""Many runs of a program, one process each: one after the other, or at once on the machines of a Ray cluster."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ag import cluster
from ag.cluster import Room
from ag.config.keys import ConfigError

METRICS = ("val/loss", "val/lm_loss", "val/accuracy", "val/evicted")  # of a run, where its metrics.csv has them
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
MACHINE_SECONDS = 10.0  # within which the hosts of a machine end after it


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        index: its place in the sweep.
        command: what starts it.
        config: its configuration; ``output``, ``recipe`` and ``resume`` are read where they exist.
        name: of its run folder.
        place: the working folder, which machines of a cluster share.
        log: file for what it prints; empty: nowhere else.
        said: its overrides, as a shell reads them.
        wait: waits for its process and returns the exit code; None: as usual.
    """

    index: int
    command: tuple[str, ...]
    config: Any
    name: str
    place: str
    log: str = ""
    said: str = ""
    wait: Callable[[Run, subprocess.Popen[bytes]], int] | None = None

    @property
    def folder(self) -> Path | None:
        """Where it writes; None for a program that names no folder."""
        if hasattr(self.config, "resume"):
            config = self.config
            return Path(config.resume) if config.resume else Path(config.output) / config.recipe / self.name
        output = getattr(self.config, "output", None)
        return Path(output) if output else None

    def start(self, **told: Any) -> subprocess.Popen[bytes]:
        """Start its process, with more arguments of Popen."""
        return subprocess.Popen(self.command, env=os.environ | {"AG_RUN": self.name}, **told)

    def ended(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for its process; returns the exit code."""
        return process.wait() if self.wait is None else self.wait(self, process)


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code, after how many seconds."""

    run: Run
    code: int
    seconds: float


def sweep(runs: list[dict[str, str]], configs: Sequence[Any], program: str, options: list[str]) -> int:
    """Run each combination in a process of its own, then print a table.

    Without a cluster SIGINT, SIGTERM and SIGUSR1 are passed on to the current process, which may save a checkpoint, and
    end the sweep after it. On a cluster the same command goes on with what is not done: a run that was cut off from its
    last checkpoint.

    Args:
        runs: the overrides of each run.
        configs: the configuration of each run, with ``cluster`` where the program can be told one.
        program: name for ``python -m``.
        options: handed on to each run.

    Returns:
        0, 1 when a run failed, or 128 + the number of the signal that ended the sweep.
    """
    address = getattr(configs[0], "cluster", None)
    runs = [{name: text for name, text in run.items() if name != "cluster"} for run in runs]
    words = [[f"{name}={text}" for name, text in run.items()] for run in runs]
    alone = [] if address is None else ["cluster=null"]  # a recipe may say otherwise
    commands = [(sys.executable, "-m", program, *options, *each, *alone) for each in words]
    said = [shlex.join(each) for each in words]
    if address is None:
        begun = time.strftime("%Y-%m-%d_%H-%M-%S")
        todo = [
            Run(i, commands[i], configs[i], f"{begun}-{i + 1}", os.getcwd(), said=said[i]) for i in range(len(runs))
        ]
        return told(todo, len(runs), configs[0])
    name = hashlib.sha256(json.dumps([program, *runs]).encode()).hexdigest()[:12]
    folder = Path(getattr(configs[0], "output", None) or "runs") / "sweeps" / name
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "done.txt"
    there = set(done.read_text().split()) if done.exists() else set()
    todo = [
        Run(i, commands[i], configs[i], f"sweep-{name}-{i:04d}", os.getcwd(), str(folder / f"{i:04d}.log"), said[i])
        for i in range(len(runs))
        if str(i) not in there
    ]
    print(f"{len(todo)} of {len(runs)} runs; what they print is in {folder}", flush=True)

    def noted(ended: Iterator[Ended]) -> Iterator[Ended]:
        for one in ended:
            if one.code == 0:
                with done.open("a") as file:
                    file.write(f"{one.run.index}\n")
            yield one

    return told(todo, len(runs), configs[0], noted)


def told(
    runs: Sequence[Run], total: int, config: Any, noted: Callable[[Iterator[Ended]], Iterator[Ended]] | None = None
) -> int:
    """Run here, or on the cluster that a configuration names, and print a table of what came of it.

    Args:
        runs: what is to be done.
        total: number of runs, with those that were done before.
        config: the configuration of one of them.
        noted: is handed what has ended, as it ends, and hands it on.

    Returns:
        As :func:`sweep`.
    """
    address, signalled = getattr(config, "cluster", None), list[int]()
    ended = _here(runs, total, signalled) if address is None else _on_cluster(runs, total, address, config)
    rows, failed = [], 0
    for one in ended if noted is None else noted(ended):
        failed += one.code != 0
        folder, result = one.run.folder, f"exit {one.code}" if one.code else "ok"
        measured = _measured(folder) if folder else {}
        numbers = [measured.get(name, "") for name in METRICS]
        rows.append([f"{one.run.index + 1}", result, f"{one.seconds:.0f}", *numbers, str(folder or ""), one.run.said])
    rows.sort(key=lambda row: int(row[0]))
    print("", *_table(["run", "result", "seconds", *METRICS, "folder", "overrides"], rows), sep="\n")
    return 128 + signalled[-1] if signalled else int(failed > 0)


def _here(runs: Sequence[Run], total: int, signalled: list[int]) -> Iterator[Ended]:
    """Run one after the other, until a signal comes, which is noted."""
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, _: FrameType | None) -> None:
        signalled.append(number)
        if number != signal.SIGINT and process is not None:  # a terminal sends SIGINT to both
            process.send_signal(number)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    for run in runs:
        if signalled:
            break
        print(f"[{run.index + 1}/{total}] {run.said}", flush=True)
        start = time.monotonic()
        process = replace(run, command=(*run.command, *_begun(run))).start()
        yield Ended(run, run.ended(process), time.monotonic() - start)
    for number, handler in before.items():
        signal.signal(number, handler)


def _on_cluster(runs: Sequence[Run], total: int, address: str, config: Any) -> Iterator[Ended]:
    """Run on the machines of a cluster, all of which see the run folders."""
    if not runs:
        return
    with cluster.connected(address):
        for run, ended in cluster.share(runs, Runner, _room(config)):
            if isinstance(ended, cluster.Lost):
                print(f"run {run.index + 1}: {ended.times} machines ended while they worked on it: {ended.why}")
                ended = Ended(run, 1, 0.0)
            print(f"[{run.index + 1}/{total}] exit {ended.code}, {ended.seconds:.0f} s", flush=True)
            yield ended


class Runner:
    """Does the runs of a sweep on a machine of a cluster, each in a process of its own."""

    def __call__(self, run: Run) -> Ended:
        """Do a run; one that was begun before goes on from its last checkpoint."""
        start = time.monotonic()
        os.chdir(run.place)
        run = replace(run, command=(*run.command, *_begun(run)))
        with Path(run.log).open("ab") as log:
            process = run.start(stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            code = run.ended(process)
        ended = Ended(run, code, time.monotonic() - start)
        if code == -signal.SIGKILL:  # perhaps with its machine: this host then ends too, and the run is done elsewhere
            time.sleep(MACHINE_SECONDS)
        return ended


def _room(config: Any) -> Room:
    """Return what a run takes of a machine: its devices.

    Raises:
        ConfigError: for a run of several machines.
    """
    trainer = getattr(config, "trainer", None)
    if trainer is None:
        return Room.on(getattr(config, "device", "cpu"))
    if trainer.num_nodes > 1:
        raise ConfigError(f"trainer.num_nodes={trainer.num_nodes}: expected 1 in a sweep on cluster={config.cluster}")
    return Room(gpus=trainer.devices if cluster.on_gpu(trainer.accelerator) else 0)


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


def _begun(run: Run) -> list[str]:
    """Return the arguments that continue a run; its folder is renamed when it has no checkpoint."""
    folder = run.folder
    if folder is None or not hasattr(run.config, "resume") or run.config.resume:  # which its command says already
        return []
    if any((folder / "checkpoints").glob("step=*.ckpt")):
        return [f"resume={folder}"]
    if folder.exists():
        folder.rename(folder.with_name(f"{run.name}.{time.time_ns()}"))
    return []
