"""The results as JSON, as a Markdown table and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Row = dict[str, Any]
#: What the picture shows of each mode.
SHOWN = {
    "decode": "x full",
    "stream": "over full",
    "prefill": "over full",
    "train": "time over lora",
    "memory": "KV of full",
}


def write(folder: Path, mode: str, results: dict[str, Any]) -> list[Path]:
    """Write MODE.json, MODE.md and MODE.png; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{mode}.{suffix}" for suffix in ("json", "md", "png")]
    paths[0].write_text(json.dumps(results, indent=2) + "\n")
    paths[1].write_text(markdown(results))
    plot(results["rows"], SHOWN[mode]).savefig(paths[2])
    return paths


def markdown(results: dict[str, Any]) -> str:
    """Return the command, the machine and the table."""
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
        *(f"\n{line}" for line in skipped(results)),
    ]
    return "\n".join(lines) + "\n"


def skipped(results: dict[str, Any]) -> list[str]:
    """Return a line for each contestant that could not run."""
    rows: list[Row] = results.get("skipped", [])  # earlier files have none
    return [f"Skipped: {row['contestant']}, {row['context']:,} tokens: {row['skipped']}" for row in rows]


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and name.startswith("nats"):
        return f"{value:.4f}"
    if isinstance(value, float):
        return f"{value:.1%}" if name in ("kept", "trained of base") else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def plot(rows: list[Row], value: str) -> Figure:
    """Draw a value over the context, a line for each contestant and batch."""
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for contestant, batch in dict.fromkeys((row["contestant"], row["batch"]) for row in rows):
        mine = [row for row in rows if (row["contestant"], row["batch"]) == (contestant, batch)]
        mine = [row for row in mine if row[value] is not None]
        axes.plot(
            [row["context"] for row in mine], [row[value] for row in mine], "o-", label=f"{contestant}, batch {batch}"
        )
    contexts = sorted({row["context"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel(value)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return figure
