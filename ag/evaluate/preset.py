"""``python -m ag.evaluate``: a comparison with the settings of a run, and its figures."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ag.commands.evaluate import TASK, EvaluateConfig, Preset, translate
from ag.config.command_line import Invocation
from ag.evaluate.comparison.cells import list_cells
from ag.evaluate.comparison.compare import compare, log
from ag.evaluate.comparison.result import Result
from ag.evaluate.comparison.tables import OVER, OVER_NOTE, counted


def run(invocation: Invocation[EvaluateConfig]) -> int:
    """Run ``python -m ag.evaluate`` and print its table; returns the exit code (2: cells failed)."""
    preset = translate(invocation.config)
    if invocation.dry_run:
        print(*(cell.name for cell in list_cells(preset.config)), sep="\n")
        return 0
    console = Console()
    comparison = compare(preset.config, console, invocation.line)
    results = {name_of(preset, result): result for result in comparison.results if result.outcomes}
    text = json.dumps({name: figures(result) for name, result in results.items()}, indent=2)
    invocation.config.file.write_text(text, encoding="utf-8")
    if results:
        console.print(table(results, counted(comparison, TASK)))
        console.print(f"{comparison.folder / 'report.html'}", soft_wrap=True)
    if preset.trained is not None and "wandb" in preset.trained.logger:
        log(comparison, Path(str(invocation.config.run)), preset.trained.recipe, preset.trained.wandb)
    for result in comparison.failed:
        print(f"ag.evaluate: error: {name_of(preset, result)}: {result.summary.problem}", file=sys.stderr)
    return 2 if comparison.failed else 0


def name_of(preset: Preset, result: Result) -> str:
    """Return the name of a result: ``full cache``, ``flags``, ``gates 0.5``, ``h2o 0.5``."""
    return f"{preset.names[result.summary.label]} {result.budget}".rstrip()


def figures(result: Result) -> dict[str, Any]:
    """Return the figures of a policy in ``evaluation.json``.

    ``losses`` are the NLL per token of each right response and ``tokens`` its length. ``kept`` is the kept share of the
    prompts' (token, layer, KV head) entries, ``kv_bytes`` the bytes of all prompts, ``accuracy`` the share of questions
    whose right answer is the likeliest, None without questions.
    """
    right = [float(outcome.tags["accuracy"]) for outcome in result.outcomes if "accuracy" in outcome.tags]
    return {
        "losses": [outcome.score for outcome in result.outcomes],
        "tokens": [outcome.tags["tokens"] for outcome in result.outcomes],
        "kept": result.summary.kept,
        "kv_bytes": sum(outcome.kv_bytes for outcome in result.outcomes),
        "accuracy": sum(right) / len(right) if right else None,
    }


def table(results: dict[str, Result], title: str) -> Table:
    """Return the printed table. Differences are paired, with their standard error."""
    over = [
        f"{name} in {result.summary.over_budget} of {result.summary.n}"
        for name, result in results.items()
        if result.summary.over_budget
    ]
    caption = f"{OVER}: {', '.join(over)} {OVER_NOTE}" if over else None
    out = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    out.add_column("cache", overflow="fold")
    for column in ("loss", "difference", "accuracy", "evicted", "KV bytes"):
        out.add_column(column, justify="right", no_wrap=True)
    for name, result in results.items():
        values, paired = figures(result), result.paired
        error = math.nan if paired is None or paired.error is None else paired.error
        out.add_row(
            name,
            f"{result.summary.mean:.4f}",
            "" if paired is None else f"{paired.difference:+.4f} +- {error:.4f}",
            "" if values["accuracy"] is None else f"{values['accuracy']:.1%}",
            f"{1 - values['kept']:.1%}",
            f"{values['kv_bytes']:,}",
        )
    return out
