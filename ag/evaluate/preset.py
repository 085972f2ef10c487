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
from ag.evaluate.comparison.rows import Comparison, Row
from ag.evaluate.comparison.tables import OVER, OVER_NOTE, counted


def run(invocation: Invocation[EvaluateConfig]) -> int:
    """Run ``python -m ag.evaluate`` and print its table; returns the exit code (2: cells failed)."""
    preset = translate(invocation.config)
    if invocation.dry_run:
        print(*(cell.name for cell in list_cells(preset.config)), sep="\n")
        return 0
    console = Console()
    comparison = compare(preset.config, console, invocation.line)
    rows = {name_of(preset, row): row for row in comparison.results if row.n}
    values = {name: figures(comparison, row) for name, row in rows.items()}
    invocation.config.file.write_text(json.dumps(values, indent=2), encoding="utf-8")
    if rows:
        console.print(table(rows, values, counted(comparison, TASK)))
        console.print(f"{comparison.folder / 'report.html'}", soft_wrap=True)
    if preset.trained is not None and "wandb" in preset.trained.logger:
        log(comparison, Path(str(invocation.config.run)), preset.trained.recipe, preset.trained.wandb)
    for row in comparison.failed:
        print(f"ag.evaluate: error: {name_of(preset, row)}: {row.problem}", file=sys.stderr)
    return 2 if comparison.failed else 0


def name_of(preset: Preset, row: Row) -> str:
    """Return the name of a row: ``full cache``, ``flags``, ``gates 0.5``, ``h2o 0.5``."""
    return f"{preset.names[row.label]} {row.budget}".rstrip()


def figures(comparison: Comparison, row: Row) -> dict[str, Any]:
    """Return the figures of a policy in ``evaluation.json``.

    ``losses`` are the NLL per token of each right response and ``tokens`` its length. ``kept`` is the kept share of the
    prompts' (token, layer, KV head) entries, ``kv_bytes`` the bytes of all prompts, ``accuracy`` the share of questions
    whose right answer is the likeliest, None without questions.
    """
    outcomes = comparison.outcomes(row)
    right = [float(outcome.tags["accuracy"]) for outcome in outcomes if "accuracy" in outcome.tags]
    return {
        "losses": [outcome.score for outcome in outcomes],
        "tokens": [outcome.tags["tokens"] for outcome in outcomes],
        "kept": row.kept,
        "kv_bytes": sum(outcome.kv_bytes for outcome in outcomes),
        "accuracy": sum(right) / len(right) if right else None,
    }


def table(rows: dict[str, Row], values: dict[str, dict[str, Any]], title: str) -> Table:
    """Return the printed table. Differences are paired, with their standard error."""
    over = [f"{name} in {row.over_budget:.0f} of {row.n}" for name, row in rows.items() if row.over_budget > 0]
    caption = f"{OVER}: {', '.join(over)} {OVER_NOTE}" if over else None
    out = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    out.add_column("cache", overflow="fold")
    for column in ("loss", "difference", "accuracy", "evicted", "KV bytes"):
        out.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        accuracy = values[name]["accuracy"]
        paired = not math.isnan(row.difference)
        out.add_row(
            name,
            f"{row.mean:.4f}",
            f"{row.difference:+.4f} +- {row.difference_error:.4f}" if paired else "",
            "" if accuracy is None else f"{accuracy:.1%}",
            f"{1 - row.kept:.1%}",
            f"{values[name]['kv_bytes']:,}",
        )
    return out
