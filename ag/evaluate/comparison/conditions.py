"""Under what the rows of a comparison were measured, beside what their keys hold: recorded, and said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from datetime import UTC, datetime
from typing import Any

import torch

from ag.commands.compare import CompareConfig
from ag.evaluate.comparison.folder import Summary
from ag.hardware import cpu_name

UNKNOWN = "unknown"  # rows of earlier versions do not say it


def conditions(config: CompareConfig, command: str) -> dict[str, Any]:
    """Return the fields of a :class:`Summary` that this process and moment decide.

    ``command`` is the command line, or what :func:`called` returns.
    """
    device = torch.device(config.device)
    return {
        "dtype": config.dtype,
        "quantization": config.quantization,
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
    }


def called(config: CompareConfig) -> str:
    """Return the Python call of a comparison that no command line asked for, with what differs from the defaults."""
    given = []
    for field in fields(config):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if (value := getattr(config, field.name)) != default:
            given.append(f"{field.name}={value!r}")
    return f"compare(CompareConfig({', '.join(given)}), console)"


def measured(summaries: Sequence[Summary]) -> list[tuple[str, str]]:
    """Return name and text of what a comparison was measured with; values that some rows alone have are counted."""
    dates = sorted(summary.date for summary in summaries if summary.date is not None)
    period = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
    said: dict[str, Callable[[Summary], str]] = {
        "model": _weights,
        "versions": lambda summary: ", ".join(f"{name} {one}" for name, one in summary.versions.items()),
        "hardware": _hardware,
        "date": lambda summary: UNKNOWN if summary.date is None else period,
        "command": lambda summary: summary.command or UNKNOWN,
    }
    return [(name, text) for name, say in said.items() for text in _counted(list(map(say, summaries)))]


def prompts(summaries: Iterable[Summary]) -> str:
    """Say how long the samples of a task are, and with which options it was run."""
    summary = next((summary for summary in summaries if summary.prompt_mean is not None), None)
    if summary is None:
        return f"prompts: {UNKNOWN}; options: {UNKNOWN}"
    low, high = summary.prompt_min, summary.prompt_max
    spread = "" if low == high else f" on average ({low} to {high})"
    options = ", ".join(f"{name}={_plain(one)}" for name, one in (summary.task_options or {}).items())
    return f"prompts: {summary.prompt_mean:g} tokens{spread}; options: {options or 'none'}"


def _weights(summary: Summary) -> str:
    parts = [summary.model, summary.dtype or f"dtype {UNKNOWN}", summary.quantization or "none"]
    return ", ".join(parts).removesuffix(", none")


def _hardware(summary: Summary) -> str:
    found = summary.hardware or UNKNOWN
    return found if summary.threads is None else f"{found}, {summary.threads} thread{'s' * (summary.threads != 1)}"


def _counted(texts: Sequence[str]) -> list[str]:
    """Return each text once, and where there are several in how many rows it stands."""
    counts = Counter(texts)
    if len(counts) == 1:
        return [*counts]
    return [f"{text} ({count} of {len(texts)} rows)" for text, count in counts.items()]


def _plain(value: Any) -> str:
    return f"[{','.join(map(_plain, value))}]" if isinstance(value, list) else str(value)
