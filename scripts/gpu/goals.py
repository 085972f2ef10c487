"""The numbers of a line's results that its goals are about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scripts.gpu.line import Result

DENSE = ("flash ms", "cudnn ms", "flash-attn ms")


def of(result: Result, mode: str, contestant: str, column: str) -> list[float]:
    """Return a column of a contestant's rows, by context."""
    rows = [row for row in result[mode]["rows"] if row["contestant"] == contestant]
    return [row[column] for row in sorted(rows, key=lambda row: row["context"])]


def over_transformers(result: Result, static: bool) -> float:
    """Return the time of transformers, of its fastest form at any context, over that of ``full``."""
    full = {row["context"]: float(row["ms/token"]) for row in result["decode"]["rows"] if row["contestant"] == "full"}
    rivals = [row for row in result["decode"]["rows"] if row["contestant"].startswith("transformers")]
    return min(
        float(row["ms/token"]) / full[row["context"]] for row in rivals if ("static" in row["contestant"]) == static
    )


def longest(result: Result) -> dict[bool, list[Mapping[str, Any]]]:
    """Return the rows of prefill at the longest prompt: those of gates (True), and those that evict nothing."""
    rows = result["prefill"]["rows"]
    rows = [row for row in rows if row["context"] == max(row["context"] for row in rows)]
    return {mine: [row for row in rows if row["contestant"].startswith("flags") == mine] for mine in (True, False)}


def prefilled(result: Result) -> float:
    """Return the time of the fastest dense prefill over that of gates, at the longest prompt."""
    rows = longest(result)
    return min(float(row["seconds"]) for row in rows[False]) / float(rows[True][0]["seconds"])


def attended(result: Result) -> float:
    """Return the time of the fastest dense attention over that of gated_prefill."""
    row = next(row for row in result["kernels"]["rows"] if row["kernel"] == "gated_prefill")
    dense = [value for name, value in row.items() if name in DENSE and isinstance(value, float)]
    return min(dense) / float(row["ms"])


def doubling(result: Result) -> float:
    """Return what a row twice as long takes beside what is held, over the shorter one."""
    shorter, longer = map(float, of(result, "train", "gates+lora", "peak over held"))
    return longer / shorter


def reached(kernel: str) -> Callable[[Result], float]:
    """Return what takes the least of a kernel's rows."""
    return lambda r: min(float(row["of bound"]) for row in r["kernels"]["rows"] if row["kernel"] == kernel)
