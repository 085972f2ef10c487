"""``python -m ag.evaluate``: a comparison with the settings of a run, and its figures."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ag.commands.evaluate import TASK, EvaluateConfig, translate
from ag.config.command_line import Invocation
from ag.evaluate.comparison.cells import list_cells
from ag.evaluate.comparison.compare import compare, log
from ag.evaluate.comparison.rows import Comparison, Row
from ag.evaluate.comparison.tables import OVER, OVER_NOTE, counted, printed_table


def run(invocation: Invocation[EvaluateConfig]) -> int:
    """Run ``python -m ag.evaluate`` and print its table; returns the exit code (2: cells failed)."""
    preset = translate(invocation.config)
    if invocation.dry_run:
        print(*(cell.name for cell in list_cells(preset.config)), sep="\n")
        return 0
    console = Console()
    comparison = compare(preset.config, console, invocation.line)
    names = {row.key: f"{preset.names[row.label]} {row.budget}".rstrip() for row in comparison.results}
    values = {names[row.key]: figures(comparison, row) for row in comparison.results if row.n}
    invocation.config.file.write_text(json.dumps(values, indent=2), encoding="utf-8")
    if values:
        console.print(table(comparison, names, values))
        console.print(f"{comparison.folder / 'report.html'}", soft_wrap=True)
    if preset.run_config is not None and "wandb" in preset.run_config.logger:
        log(comparison, Path(str(invocation.config.run)), preset.run_config.recipe, preset.run_config.wandb)
    for row in comparison.failed:
        print(f"ag.evaluate: error: {names[row.key]}: {row.problem}", file=sys.stderr)
    return 2 if comparison.failed else 0


def figures(comparison: Comparison, row: Row) -> dict[str, Any]:
    """Return the figures of a policy in ``evaluation.json``."""
    outcomes = comparison.outcomes(row)
    right = [float(outcome.tags["accuracy"]) for outcome in outcomes if "accuracy" in outcome.tags]
    return {
        "losses": [outcome.score for outcome in outcomes],  # NLL per token of each right response
        "tokens": [outcome.tags["tokens"] for outcome in outcomes],  # its length
        "kept": row.kept,  # share of the prompts' (token, layer, KV head) entries
        "kv_bytes": sum(outcome.kv_bytes for outcome in outcomes),  # of all prompts
        "accuracy": sum(right) / len(right) if right else None,  # of questions: the right answer is the likeliest
    }


def table(comparison: Comparison, names: dict[str, str], values: dict[str, dict[str, Any]]) -> Table:
    """Return the printed table. Differences are paired, with their standard error."""
    rows = [row for row in comparison.results if row.n]
    over = [f"{names[row.key]} in {row.over_budget:.0f} of {row.n}" for row in rows if row.over_budget > 0]
    caption = f"{OVER}: {', '.join(over)} {OVER_NOTE}" if over else None
    out = printed_table(["cache"], ["loss", "difference", "accuracy", "evicted", "KV bytes"], caption)
    out.title = counted(comparison, TASK)
    for row in rows:
        accuracy, kv_bytes = (values[names[row.key]][name] for name in ("accuracy", "kv_bytes"))
        out.add_row(
            names[row.key],
            f"{row.mean:.4f}",
            _difference_text(row),
            "" if accuracy is None else f"{accuracy:.1%}",
            f"{1 - row.kept:.1%}",
            f"{kv_bytes:,}",
        )
    return out


def _difference_text(row: Row) -> str:
    """Return the difference with its standard error, which a single sample does not have."""
    if math.isnan(row.difference):
        return ""
    error = "" if math.isnan(row.difference_error) else f" +- {row.difference_error:.4f}"
    return f"{row.difference:+.4f}{error}"
