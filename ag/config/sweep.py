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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
        log: file for what it prints; an empty text means that it prints where the sweep prints.
        said: its overrides, as a shell reads them.
    """

    index: int
    command: tuple[str, ...]
    config: Any
    name: str
    place: str
    log: str = ""
    said: str = ""

    @property
    def folder(self) -> Path | None:
        """Where it writes; None for a program that names no folder."""
        if hasattr(self.config, "resume"):
            config = self.config
            return Path(config.resume) if config.resume else Path(config.output) / config.recipe / self.name
        output = getattr(self.config, "output", None)
        return Path(output) if output else None

    def start(self, **arguments: Any) -> subprocess.Popen[bytes]:
        """Start its process, from its last checkpoint where it was begun before; ``arguments`` are those of Popen."""
        return subprocess.Popen((*self.command, *_begun(self)), env=os.environ | {"AG_RUN": self.name}, **arguments)


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
    digest = hashlib.sha256(json.dumps([program, *runs]).encode()).hexdigest()[:12]
    folder = Path(getattr(configs[0], "output", None) or "runs") / "sweeps" / digest
    begun = time.strftime("%Y-%m-%d_%H-%M-%S")
    todo = []
    for i, run in enumerate(runs):
        words = [f"{name}={text}" for name, text in run.items()]
        command, said = (sys.executable, "-m", program, *options, *words), shlex.join(words)
        if address is None:
            todo.append(Run(i, command, configs[i], f"{begun}-{i + 1}", os.getcwd(), said=said))
        else:
            command = (*command, "cluster=null")  # a recipe may say otherwise
            name, log = f"sweep-{digest}-{i:04d}", str(folder / f"{i:04d}.log")
            todo.append(Run(i, command, configs[i], name, os.getcwd(), log, said))
    signalled: list[int] = []
    ended = _here(todo, signalled) if address is None else _on_cluster(todo, address, folder)
    rows, failed = [], 0
    for one in ended:
        failed += one.code != 0
        place, result = one.run.folder, f"exit {one.code}" if one.code else "ok"
        measured = _measured(place) if place else {}
        numbers = [measured.get(name, "") for name in METRICS]
        rows.append([f"{one.run.index + 1}", result, f"{one.seconds:.0f}", *numbers, str(place or ""), one.run.said])
    rows.sort(key=lambda row: int(row[0]))
    print("", *_table(["run", "result", "seconds", *METRICS, "folder", "overrides"], rows), sep="\n")
    return 128 + signalled[-1] if signalled else int(failed > 0)


def _here(runs: Sequence[Run], signalled: list[int]) -> Iterator[Ended]:
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
        print(f"[{run.index + 1}/{len(runs)}] {run.said}", flush=True)
        start = time.monotonic()
        process = run.start()
        yield Ended(run, process.wait(), time.monotonic() - start)
    for number, handler in before.items():
        signal.signal(number, handler)


def _on_cluster(runs: Sequence[Run], address: str, folder: Path) -> Iterator[Ended]:
    """Run what is not done on the machines of a cluster, all of which see the run folders and ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "done.txt"
    there = set(done.read_text().split()) if done.exists() else set()
    todo = [run for run in runs if str(run.index) not in there]
    print(f"{len(todo)} of {len(runs)} runs; what they print is in {folder}", flush=True)
    if not todo:
        return
    with cluster.connected(address):
        for run, ended in cluster.share(todo, lambda: _do, _room(todo[0].config)):
            if isinstance(ended, cluster.Lost):
                print(f"run {run.index + 1}: {ended.times} machines ended while they worked on it: {ended.why}")
                ended = Ended(run, 1, 0.0)
            if ended.code == 0:
                with done.open("a") as file:
                    file.write(f"{run.index}\n")
            print(f"[{run.index + 1}/{len(runs)}] exit {ended.code}, {ended.seconds:.0f} s", flush=True)
            yield ended


def _do(run: Run) -> Ended:
    """Do a run on a machine of a cluster, in a process of its own; one that was begun goes on from its checkpoint."""
    start = time.monotonic()
    os.chdir(run.place)
    with Path(run.log).open("ab") as log:
        code = run.start(stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).wait()
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
    """Align columns; those of which nothing is known are left out."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) if any(row[i] for row in rows) else 0 for i in range(len(head))]
    return [
        " " + "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True) if width).rstrip()
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
