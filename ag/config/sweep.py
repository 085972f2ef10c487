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

METRICS = ("val/loss", "val/lm_loss", "val/accuracy", "val/evicted")  # columns of the table
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
MACHINE_SECONDS = 10.0  # longest time between the end of a machine and of its hosts


@dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    index: int  # its index in the sweep
    command: tuple[str, ...]  # its command
    config: Any  # its configuration; ``output``, ``recipe`` and ``resume`` are read if they exist
    name: str  # of its run folder
    place: str  # the working folder, which the machines of a cluster share
    log: str = ""  # file for its output; empty means the output of the sweep
    overrides: str = ""  # its overrides, as a shell reads them

    @property
    def folder(self) -> Path | None:
        """Its output folder; None for a program without one."""
        if hasattr(self.config, "resume"):
            config = self.config
            return Path(config.resume) if config.resume else Path(config.output) / config.recipe / self.name
        output = getattr(self.config, "output", None)
        return Path(output) if output else None

    @property
    def dry(self) -> bool:
        """Whether it is a dry run, which writes nothing that a later run reads."""
        return "--dry-run" in self.command

    def start(self, **arguments: Any) -> subprocess.Popen[bytes]:
        """Start its process, from its last checkpoint if it has one; ``arguments`` are those of Popen."""
        return subprocess.Popen((*self.command, *_begun(self)), env=os.environ | {"AG_RUN": self.name}, **arguments)


@dataclass(frozen=True)
class Ended:
    """The exit code and the seconds of a run."""

    run: Run
    code: int
    seconds: float


def sweep(runs: list[dict[str, str]], configs: Sequence[Any], program: str, options: list[str]) -> int:
    """Run each combination in a separate process, then print a table.

    Without a cluster SIGINT, SIGTERM and SIGUSR1 are passed on to the current process, which may save a checkpoint, and
    end the sweep after it. On a cluster the same command continues an interrupted sweep, and each interrupted run from
    its last checkpoint.

    Args:
        runs: the overrides of each run.
        configs: the configuration of each run, with ``cluster`` if the program has that key.
        program: name for ``python -m``.
        options: options for each run.

    Returns:
        0; 1 when a run failed; 128 + the number of a signal that ended the sweep.
    """
    address = getattr(configs[0], "cluster", None)
    runs = [{name: text for name, text in run.items() if name != "cluster"} for run in runs]
    digest = hashlib.sha256(json.dumps([program, *runs]).encode()).hexdigest()[:12]
    folder = Path(getattr(configs[0], "output", None) or "runs") / "sweeps" / digest
    begun = time.strftime("%Y-%m-%d_%H-%M-%S")
    todo = []
    for i, run in enumerate(runs):
        words = [f"{name}={text}" for name, text in run.items()]
        command, shown = (sys.executable, "-m", program, *options, *words), shlex.join(words)
        if address is None:
            todo.append(Run(i, command, configs[i], f"{begun}-{i + 1}", os.getcwd(), overrides=shown))
        else:
            command = (*command, "cluster=null")  # a recipe may set it
            name, log = f"sweep-{digest}-{i:04d}", str(folder / f"{i:04d}.log")
            todo.append(Run(i, command, configs[i], name, os.getcwd(), log, shown))
    signalled: list[int] = []
    ended = _here(todo, signalled) if address is None else _on_cluster(todo, address, folder)
    rows, failed = [], 0
    for one in ended:
        failed += one.code != 0
        place, result = one.run.folder, f"exit {one.code}" if one.code else "ok"
        measured = _measured(place) if place else {}
        numbers = [measured.get(name, "") for name in METRICS]
        ends = [str(place or ""), one.run.overrides]
        rows.append([f"{one.run.index + 1}", result, f"{one.seconds:.0f}", *numbers, *ends])
    rows.sort(key=lambda row: int(row[0]))
    print("", *_table(["run", "result", "seconds", *METRICS, "folder", "overrides"], rows), sep="\n")
    return 128 + signalled[-1] if signalled else int(failed > 0)


def _here(runs: Sequence[Run], signalled: list[int]) -> Iterator[Ended]:
    """Run one after the other, until a signal, which is appended to ``signalled``."""
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, _: FrameType | None) -> None:
        signalled.append(number)
        if number != signal.SIGINT and process is not None:  # a terminal sends SIGINT to both processes
            process.send_signal(number)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    for run in runs:
        if signalled:
            break
        print(f"[{run.index + 1}/{len(runs)}] {run.overrides}", flush=True)
        start = time.monotonic()
        process = run.start()
        yield Ended(run, process.wait(), time.monotonic() - start)
    for number, handler in before.items():
        signal.signal(number, handler)


def _on_cluster(runs: Sequence[Run], address: str, folder: Path) -> Iterator[Ended]:
    """Run what is not done yet on the machines of a cluster, which share the run folders and ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "done.txt"
    there = set(done.read_text().split()) if done.exists() and not runs[0].dry else set()
    todo = [run for run in runs if str(run.index) not in there]
    print(f"{len(todo)} of {len(runs)} runs; what they print is in {folder}", flush=True)
    if not todo:
        return
    with cluster.connected(address):
        for run, ended in cluster.share(todo, lambda: _do, _room(todo[0].config)):
            if isinstance(ended, cluster.Lost):
                print(f"run {run.index + 1}: {ended.times} machines died at it: {ended.why}")
                ended = Ended(run, 1, 0.0)
            if ended.code == 0 and not run.dry:
                with done.open("a") as file:
                    file.write(f"{run.index}\n")
            print(f"[{run.index + 1}/{len(runs)}] exit {ended.code}, {ended.seconds:.0f} s", flush=True)
            yield ended


def _do(run: Run) -> Ended:
    """Do a run in a separate process on a machine of a cluster."""
    start = time.monotonic()
    os.chdir(run.place)
    with Path(run.log).open("ab") as log:
        code = run.start(stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).wait()
    ended = Ended(run, code, time.monotonic() - start)
    if code == -signal.SIGKILL:  # if its machine dies, this host dies too meanwhile, and the run is done elsewhere
        time.sleep(MACHINE_SECONDS)
    return ended


def _room(config: Any) -> Room:
    """Return the resources of a run.

    Raises:
        ConfigError: for a run on several machines.
    """
    trainer = getattr(config, "trainer", None)
    if trainer is None:
        return Room.on(getattr(config, "device", "cpu"))
    if trainer.num_nodes > 1:
        raise ConfigError(f"trainer.num_nodes={trainer.num_nodes}: expected 1 in a sweep on cluster={config.cluster}")
    return Room(gpus=trainer.devices if cluster.on_gpu(trainer.accelerator) else 0)


def _measured(folder: Path) -> dict[str, str]:
    """Return the last value of each metric in a run's metrics.csv, as texts."""
    try:
        with (folder / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError:
        return {}
    return {name: f"{float(row[name]):.4f}" for row in rows for name in METRICS if row.get(name)}


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table, without empty columns."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) if any(row[i] for row in rows) else 0 for i in range(len(head))]
    return [
        " " + "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True) if width).rstrip()
        for line in lines
    ]


def _begun(run: Run) -> list[str]:
    """Return the arguments that resume a run; a run folder without a checkpoint is renamed, and the run starts anew."""
    folder = run.folder
    if run.dry or folder is None or not hasattr(run.config, "resume") or run.config.resume:  # part of its command
        return []
    if any((folder / "checkpoints").glob("step=*.ckpt")):
        return [f"resume={folder}"]
    if folder.exists():
        folder.rename(folder.with_name(f"{run.name}.{time.time_ns()}"))
    return []
