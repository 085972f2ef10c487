"""Under what the rows of a comparison were measured, beside what their keys hold: recorded, and said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from datetime import UTC, datetime
from typing import Any

import torch

from ag.commands.compare import CompareConfig
from ag.evaluate.comparison.folder import Row
from ag.hardware import cpu_name

UNKNOWN = "unknown"  # rows of earlier versions do not say it


def conditions(config: CompareConfig, command: str) -> dict[str, Any]:
    """Return what a row holds of this process at this moment: fields of :class:`Row`.

    Args:
        config: settings of the comparison.
        command: the command line, or what :func:`called` returns.
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


def measured(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return name and text of what a comparison was measured with; values that some rows alone have are counted."""
    dates = sorted(row.date for row in rows if row.date is not None)
    period = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
    found = [
        ("model", _counted(rows, _weights)),
        ("versions", _counted(rows, lambda row: ", ".join(f"{name} {one}" for name, one in row.versions.items()))),
        ("hardware", _counted(rows, _hardware)),
        ("date", _counted(rows, lambda row: UNKNOWN if row.date is None else period)),
        ("command", _counted(rows, lambda row: row.command or UNKNOWN)),
    ]
    return [(name, text) for name, texts in found for text in texts]


def prompts(rows: Iterable[Row]) -> str:
    """Say how long the samples of a task are, and with which options it was run."""
    row = next((row for row in rows if row.prompt_mean is not None), None)
    if row is None:
        return f"prompts: {UNKNOWN}; options: {UNKNOWN}"
    spread = "" if row.prompt_min == row.prompt_max else f" on average ({row.prompt_min} to {row.prompt_max})"
    options = ", ".join(f"{name}={_plain(one)}" for name, one in (row.task_options or {}).items())
    return f"prompts: {row.prompt_mean:g} tokens{spread}; options: {options or 'none'}"


def _weights(row: Row) -> str:
    dtype = row.dtype or f"dtype {UNKNOWN}"
    return f"{row.model}, {dtype}" + (f", {row.quantization}" if row.quantization not in (None, "none") else "")


def _hardware(row: Row) -> str:
    threads = "" if row.threads is None else f", {row.threads} {'thread' if row.threads == 1 else 'threads'}"
    return (row.hardware or UNKNOWN) + threads


def _counted(rows: Sequence[Row], say: Callable[[Row], str]) -> list[str]:
    texts = [say(row) for row in rows]
    several = len(set(texts)) > 1
    return [f"{text} ({texts.count(text)} of {len(rows)} rows)" if several else text for text in dict.fromkeys(texts)]


def _plain(value: Any) -> str:
    return f"[{','.join(map(_plain, value))}]" if isinstance(value, list) else str(value)
