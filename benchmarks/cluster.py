"""What dealing a large comparison out costs: ``python -m benchmarks.cluster cells=10000 machines=[1,2,4,8]``.

The cluster is simulated: Ray starts a process for each machine, with room for one worker. Its cells do nothing for
``seconds`` and return scores of made-up samples, as large as real ones; this process writes them down as ``ag.compare``
does, then reads the folder and renders the page. Writes ``cluster.json`` into ``output``, and prints a table.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ag import cluster
from ag.commands.compare import CompareConfig
from ag.config import key
from ag.config.command_line import command, parse
from ag.evaluate.comparison.cells import Cell, list_cells
from ag.evaluate.comparison.folder import Ended, Folder
from ag.evaluate.comparison.page import render
from ag.evaluate.comparison.result import Comparison
from ag.evaluate.tasks import Loaded, Outcome
from benchmarks.report import report

PROGRAM = "cluster"
TASKS = ["ppl", "needle_single", "passkey", "key_values", "needle_variables"]
POLICIES = ["h2o", "tova", "snapkv", "streaming_llm"]


@dataclass
class Config:
    """What the measurement can be told."""

    cells: int = key(10_000, "cells", low=20)
    machines: list[int] = key([1, 2, 4, 8], "numbers of machines, with one worker each")
    seconds: float = key(0.05, "that each cell takes", low=0)
    samples: int = key(60, "samples of a cell", low=2)
    output: str = key("runs/bench", "folder for cluster.json")


@dataclass
class Found:
    """What was measured with so many machines; all in seconds.

    Attributes:
        machines: of one worker each.
        cells: that were run.
        begin: until the cluster's workers had begun.
        work: from the first cell to the last row.
        overhead: that a worker lost with each cell.
        read: of all rows and their samples by a new process.
        page: to render it.
    """

    machines: int
    cells: int
    begin: float = 0.0
    work: float = 0.0
    overhead: float = 0.0
    read: float = 0.0
    page: float = 0.0
    bytes: dict[str, int] = field(default_factory=dict)


class Idle:
    """Does a cell: nothing, for a while.

    Args:
        seconds: that it takes.
        samples: of a cell.
    """

    def __init__(self, seconds: float, samples: int) -> None:
        self.seconds, self.samples = seconds, samples

    def __call__(self, cell: Cell) -> Ended:
        """Return made-up scores of a cell."""
        end, draw = time.monotonic() + self.seconds, random.Random(cell.key)
        scores = [draw.gauss(2.5, 0.4) for _ in range(self.samples)]
        outcomes = [Outcome(f"book {i}", score, 512, 0.25, 2**20, 0.1) for i, score in enumerate(scores)]
        summary = cell.summary(outcomes, Loaded([]), "dense", {})
        time.sleep(max(0.0, end - time.monotonic()))
        return Ended(summary, outcomes, [])


def plan(config: Config) -> CompareConfig:
    """Return a comparison of so many cells, or a few more."""
    count = -(-config.cells // (len(TASKS) * len(POLICIES)))
    budgets = [round((i + 1) / (count + 1), 6) for i in range(count)]
    return CompareConfig(
        policies=POLICIES, budgets=budgets, tasks=TASKS, baseline="h2o", root=".", output=config.output
    )


def measure(config: Config, machines: int) -> Found:
    """Deal the cells out to so many machines, and write, read and show what came of them."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory() as place:
        made: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(machines):
            made.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        told = plan(config)
        cells = list_cells(told)[: config.cells]
        folder, found = Folder(place), Found(machines, len(cells))
        start = time.perf_counter()
        with cluster.connected(made.address):
            ended = cluster.share(cells, partial(Idle, config.seconds, config.samples), cluster.Room())
            begun = 0.0
            for _, one in ended:
                if isinstance(one, cluster.Lost):
                    raise RuntimeError(one.why)
                begun = begun or time.perf_counter()
                folder.append(one)
            found.begin, found.work = begun - start, time.perf_counter() - begun
        made.shutdown()
        found.overhead = found.work * machines / (len(cells) - machines) - config.seconds
        start = time.perf_counter()
        rows = Folder(place).read()
        found.read = time.perf_counter() - start
        start = time.perf_counter()
        page = render(Comparison.of(told, cells, rows, folder.path))
        found.page = time.perf_counter() - start
        sizes = {name: sum(x.stat().st_size for x in Path(place).glob(name)) for name in ("results.jsonl", "samples/*")}
        found.bytes = sizes | {"report.html": len(page)}
    return found


def table(results: list[Found]) -> str:
    """Return what was found as a table."""
    lines = [
        "| machines | cells | begin, s | cells, s | overhead of a cell, ms | read, s | page, s | MB |",
        "|---" * 8 + "|",
    ]
    for x in results:
        sizes = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in x.bytes.items())
        times = f"{x.begin:.1f} | {x.work:.1f} | {1000 * x.overhead:.1f} | {x.read:.1f} | {x.page:.1f}"
        lines.append(f"| {x.machines} | {x.cells} | {times} | {sizes} |")
    return "\n".join(lines)


@command(PROGRAM)
def main(argv: list[str]) -> int:
    """Measure, and write down what was found."""
    config = parse(argv, Config, PROGRAM).config
    report((measure(config, machines) for machines in config.machines), table, config, "cluster.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
