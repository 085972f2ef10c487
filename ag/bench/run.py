"""The measurements of ``python -m ag.bench`` in one mode."""

from __future__ import annotations

from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ag.bench import decode, memory, prefill, stream, train
from ag.bench.contestants import backends
from ag.bench.measure import machine
from ag.bench.write import markdown, write
from ag.commands.bench import BenchConfig
from ag.config.command_line import Invocation
from ag.errors import UserError, first_line

#: Each mode prepares what all its cases share, and measures the rows of one context and batch.
MODULES = {"decode": decode, "stream": stream, "prefill": prefill, "train": train, "memory": memory}


def run(asked: Invocation[BenchConfig]) -> int:
    """Measure and print what ``python -m ag.bench`` is asked for; returns the exit code."""
    config = asked.config
    check(config)
    if asked.dry_run:
        print(*(f"{config.mode}: context {n}, batch {b}" for n in config.context for b in config.batch), sep="\n")
        return 0
    try:
        results = bench(config, asked.line)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{first_line(error)} Give a smaller context or batch.") from error
    paths = write(Path(config.output), config.mode, results)
    print(markdown(results))
    print("written:", *paths)
    return 0


def check(config: BenchConfig) -> None:
    """Raise ``UserError`` for a device that is not there, and for sizes that cannot be."""
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device={config.device}: no CUDA device is there; give device=cpu.")
    wrong = [value for values in (config.context, config.batch) for value in values if value < 1]
    if wrong or not (config.context and config.batch):
        raise UserError(f"context={config.context}, batch={config.batch}: expected numbers of at least 1.")


def bench(config: BenchConfig, command: str) -> dict[str, Any]:
    """Measure, and return the rows with what they mean: command, date, machine, configuration, who could not run."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    described = machine(torch.device(config.device)) | {"sdpa": backends(config)[0] or "torch's choice"}
    mode = MODULES[config.mode]
    prepared, rows = mode.prepare(config), []
    for context in config.context:
        for batch in config.batch:
            rows += [{"context": context, "batch": batch} | row for row in mode.measure(prepared, context, batch)]
    return {
        "command": command,
        "date": date.today().isoformat(),
        "machine": described,
        "config": asdict(config),
        "rows": [row for row in rows if "skipped" not in row],
        "skipped": [row for row in rows if "skipped" in row],
    }
