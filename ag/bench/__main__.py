"""Measure speed and memory: ``python -m ag.bench decode context=[2048,8192] keep=[0.2]``.

``python -m ag.bench report OUT...`` folds what ``scripts/gpu.sh`` wrote.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ag.bench import decode, memory, prefill, stream, train
from ag.bench.card import summary
from ag.bench.config import MODES, BenchConfig
from ag.bench.measure import machine
from ag.bench.write import markdown, write
from ag.config.command_line import parse
from ag.errors import UserError

MODULES = {"decode": decode, "stream": stream, "prefill": prefill, "train": train, "memory": memory}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2: one line on stderr says what is wrong)."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["report"]:
        return summary.main(words[1:])
    config = parse(named(words), BenchConfig, "ag.bench").config
    try:
        results = bench(config, shlex.join(["python", "-m", "ag.bench", *words]))
    except UserError as error:
        print(f"ag.bench: error: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"ag.bench: error: {str(error).splitlines()[0]} Give a smaller context or batch.", file=sys.stderr)
        return 2
    paths = write(Path(config.output), config.mode, results)
    print(markdown(results))
    print("written:", *paths)
    return 0


def named(words: list[str]) -> list[str]:
    """Write a mode that stands as the first word as ``mode=...``."""
    return [f"mode={words[0]}", *words[1:]] if words and words[0] in MODES else words


def bench(config: BenchConfig, command: str) -> dict[str, Any]:
    """Measure, and return the rows with what they mean: command, date, machine and configuration.

    Raises:
        UserError: for a model, a policy or a device that cannot be.
    """
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device={config.device}: no CUDA device is there; give device=cpu.")
    wrong = [value for values in (config.context, config.batch) for value in values if value < 1]
    if wrong or not (config.context and config.batch):
        raise UserError(f"context={config.context}, batch={config.batch}: expected numbers of at least 1.")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    described = machine(torch.device(config.device))
    return {
        "command": command,
        "date": date.today().isoformat(),
        "machine": described,
        "config": asdict(config),
        "rows": MODULES[config.mode].measure(config),
    }


if __name__ == "__main__":
    sys.exit(main())
