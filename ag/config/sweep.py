"""Many runs of a program, each in its own process: one by one, or in parallel on the machines of a Ray cluster."""

from __future__ import annotations

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
from ag.cluster import Resources
from ag.config.keys import ConfigError
from ag.files import read_metrics

METRICS = ("val/loss", "val/lm_loss", "val/accuracy", "val/evicted")  # columns of the table
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
MACHINE_SECONDS = 10.0  # longest time between the end of a machine and of its hosts


@dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    index: int  # index in the sweep
    command: tuple[str, ...]
    config: Any  # ``output``, ``recipe`` and ``resume`` are read if they exist
    name: str  # name of the run folder
    working_dir: str  # the working folder, which the machines of a cluster share
    log: str = ""  # file for the run's output; empty means the output of the sweep
    overrides: str = ""  # as a shell reads them

    @property
    def folder(self) -> Path | None:
        """The output folder. None: the program has no output folder."""
        if hasattr(self.config, "resume"):
            config = self.config
            return Path(config.resume) if config.resume else Path(config.output) / config.recipe / self.name
        output = getattr(self.config, "output", None)
        return Path(output) if output else None

    @property
    def dry(self) -> bool:
        """Whether this is a dry run: it writes nothing that a later run reads."""
        return "--dry-run" in self.command

    def start(self, **arguments: Any) -> subprocess.Popen[bytes]:
        """Start the process, from the last checkpoint if there is one; ``arguments`` go to Popen.

        The process does not see the variables of SLURM: they are of the task that started the sweep or the cluster, and
        the run would take itself for one rank of that task's ranks.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return subprocess.Popen(
            (*self.command, *_resume_arguments(self)), env=environment | {"AG_RUN": self.name}, **arguments
        )


def sweep(runs: list[dict[str, str]], configs: Sequence[Any], program: str, options: list[str]) -> int:
    """Run each combination in a separate process, then print a table.

    Without a cluster, SIGINT, SIGTERM and SIGUSR1 are passed on to the current process, which may save a checkpoint;
    then the sweep ends. On a cluster, repeating the command continues an interrupted sweep, and each interrupted run
    from its last checkpoint.

    Each run has its overrides and its configuration, whose ``cluster`` is read if the program has this key. Returns 0;
    1 if a run failed; 128 + the number of a signal that ended the sweep.
    """
    address = getattr(configs[0], "cluster", None)
    runs = [{name: text for name, text in run.items() if name != "cluster"} for run in runs]
    digest = hashlib.sha256(json.dumps([program, *runs]).encode()).hexdigest()[:12]
    folder = Path(getattr(configs[0], "output", None) or "runs") / "sweeps" / digest
    start_time = time.strftime("%Y-%m-%d_%H-%M-%S")
    todo = []
    for i, run in enumerate(runs):
        words = [f"{name}={text}" for name, text in run.items()]
        command, shown = (sys.executable, "-m", program, *options, *words), shlex.join(words)
        if address is None:
            todo.append(Run(i, command, configs[i], f"{start_time}-{i + 1}", os.getcwd(), overrides=shown))
        else:
            command = (*command, "cluster=null")  # a recipe may set it
            name, log = f"sweep-{digest}-{i:04d}", str(folder / f"{i:04d}.log")
            todo.append(Run(i, command, configs[i], name, os.getcwd(), log, shown))
    signalled: list[int] = []
    finished_runs = _run_locally(todo, signalled) if address is None else _on_cluster(todo, address, folder)
    rows, failed = [], 0
    for finished, code, seconds in finished_runs:
        failed += code != 0
        rows_of_run = read_metrics(finished.folder / "metrics.csv") if finished.folder else []
        last_values = {name: f"{row[name]:.4f}" for row in rows_of_run for name in METRICS if name in row}
        numbers = [last_values.get(name, "") for name in METRICS]
        ends = [str(finished.folder or ""), finished.overrides]
        rows.append([f"{finished.index + 1}", f"exit {code}" if code else "ok", f"{seconds:.0f}", *numbers, *ends])
    rows.sort(key=lambda row: int(row[0]))
    print("", *_table(["run", "result", "seconds", *METRICS, "folder", "overrides"], rows), sep="\n")
    return 128 + signalled[-1] if signalled else int(failed > 0)


def _run_locally(runs: Sequence[Run], signalled: list[int]) -> Iterator[tuple[Run, int, float]]:
    """Run one by one until a signal, whose number is appended to ``signalled``."""
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, _: FrameType | None) -> None:
        signalled.append(number)
        if number != signal.SIGINT and process is not None:  # a terminal sends SIGINT to both processes
            process.send_signal(number)

    handlers = {number: signal.signal(number, stop) for number in SIGNALS}
    for run in runs:
        if signalled:
            break
        print(f"[{run.index + 1}/{len(runs)}] {run.overrides}", flush=True)
        start = time.monotonic()
        process = run.start()
        yield run, process.wait(), time.monotonic() - start
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _on_cluster(runs: Sequence[Run], address: str, folder: Path) -> Iterator[tuple[Run, int, float]]:
    """Run the unfinished runs on the machines of a cluster. They share the run folders and ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    done_file = folder / "done.txt"
    done_indices = set(done_file.read_text().split()) if done_file.exists() and not runs[0].dry else set()
    todo = [run for run in runs if str(run.index) not in done_indices]
    print(f"{len(todo)} of {len(runs)} runs; their output is in {folder}", flush=True)
    if not todo:
        return
    with cluster.connected(address):
        for run, finished in cluster.share(todo, lambda: _run_one, _resources(todo[0].config)):
            if isinstance(finished, cluster.LostUnit):
                print(f"run {run.index + 1}: {finished.times} machines died at it: {finished.why}")
                finished = 1, 0.0
            code, seconds = finished
            if code == 0 and not run.dry:
                with done_file.open("a") as file:
                    file.write(f"{run.index}\n")
            print(f"[{run.index + 1}/{len(runs)}] exit {code}, {seconds:.0f} s", flush=True)
            yield run, code, seconds


def _run_one(run: Run) -> tuple[int, float]:
    """Run in a separate process on a machine of a cluster; return the exit code and the seconds."""
    start = time.monotonic()
    os.chdir(run.working_dir)
    with Path(run.log).open("ab") as log:
        code = run.start(stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).wait()
    seconds = time.monotonic() - start
    if code == -signal.SIGKILL:  # if the machine dies, this host also dies now, and another machine does the run
        time.sleep(MACHINE_SECONDS)
    return code, seconds


def _resources(config: Any) -> Resources:
    """Return the resources of a run.

    Raises:
        ConfigError: the run needs several machines.
    """
    trainer = getattr(config, "trainer", None)
    if trainer is None:
        return Resources.on(getattr(config, "device", "cpu"))
    if trainer.num_nodes > 1:
        raise ConfigError(f"trainer.num_nodes={trainer.num_nodes}: expected 1 in a sweep on cluster={config.cluster}")
    return Resources(gpus=trainer.devices if cluster.on_gpu(trainer.accelerator) else 0)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table, without empty columns."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) if any(row[i] for row in rows) else 0 for i in range(len(head))]
    return [
        " " + "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True) if width).rstrip()
        for line in lines
    ]


def _resume_arguments(run: Run) -> list[str]:
    """Return the arguments that resume a run. A run folder without a checkpoint is renamed, and the run starts anew."""
    folder = run.folder
    if run.dry or folder is None or not hasattr(run.config, "resume") or run.config.resume:  # part of its command
        return []
    if any((folder / "checkpoints").glob("step=*.ckpt")):
        return [f"resume={folder}"]
    if folder.exists():
        folder.rename(folder.with_name(f"{run.name}.{time.time_ns()}"))
    return []
