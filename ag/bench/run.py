"""The command ``python -m ag.bench``: runs a case at each context and batch, and writes MODE.json and MODE.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ag.bench.arena import Arena
from ag.bench.cases import CASES
from ag.bench.contestants import Row, backends
from ag.bench.measure import machine
from ag.commands.bench import BenchConfig
from ag.config.command_line import Invocation
from ag.errors import UserError, first_line
from ag.model.base import check_device

PERCENT = ("kept", "trained of base")  # columns


def run(invocation: Invocation[BenchConfig]) -> int:
    """Run ``python -m ag.bench`` and print its table; return the exit code."""
    config = invocation.config
    if invocation.dry_run:
        print(*(f"{config.mode}: context {n}, batch {b}" for n in config.context for b in config.batch), sep="\n")
        return 0
    check_device(config.device)

    def write(results: dict[str, Any]) -> None:
        folder, text = Path(config.output), markdown(results)
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / f"{config.mode}.{ending}" for ending in ("json", "md")]
        written[0].write_text(json.dumps(results, indent=2) + "\n")
        written[1].write_text(text)
        print(text)
        print("written:", *written)

    try:
        results = bench(config, invocation.line, write)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{first_line(error)} Give a smaller context or batch.") from error
    if not results["rows"]:
        raise UserError(f"{config.mode}: nothing could run: {results['skipped'][0]['skipped']}")
    return 0


def bench(
    config: BenchConfig, command: str, write: Callable[[dict[str, Any]], object] = lambda results: None
) -> dict[str, Any]:
    """Measure; return the rows with command, date, machine, configuration and skipped contestants.

    ``write`` is called with them if there are any rows, also before an error goes on: then with those so far.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    results: dict[str, Any] = {
        "command": command,
        "date": date.today().isoformat(),
        "machine": machine(torch.device(config.device)) | {"sdpa": backends(config)[0] or "torch's choice"},
        "config": asdict(config),
        "rows": [],
        "skipped": [],
    }
    arena = Arena(config)
    try:
        for context in config.context:
            for batch in config.batch:
                for row in CASES[config.mode](arena, context, batch):
                    kind = "skipped" if "skipped" in row else "rows"
                    results[kind].append({"context": context, "batch": batch} | row)
    finally:
        if results["rows"]:
            write(results)
    return results


def markdown(results: dict[str, Any]) -> str:
    """Return the command, the machine, the table and the skipped contestants as Markdown."""
    rows: list[Row] = results["rows"]
    names = list(rows[0])
    lines = [
        f"{results['date']}: `{results['command']}`",
        "",
        ", ".join(f"{name} {value}" for name, value in results["machine"].items()),
        "",
        "| " + " | ".join(names) + " |",
        "|" + "|".join(":--" if name == "contestant" else "--:" for name in names) + "|",
        *("| " + " | ".join(_cell(name, row[name]) for name in names) + " |" for row in rows),
    ]
    for row in results["skipped"]:
        lines.append(f"\nSkipped: {row['contestant']}, {row['context']:,} tokens: {row['skipped']}")
    return "\n".join(lines) + "\n"


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        form = ".4f" if name.startswith("nats") else ".1%" if name in PERCENT else ".3g"
        return f"{value:{form}}"
    return f"{value:,}" if isinstance(value, int) else str(value or "")
