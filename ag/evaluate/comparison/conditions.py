"""Under what the rows of a comparison were measured, beside what their keys hold: recorded, and said."""

from __future__ import annotations

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
    """Return what a summary holds of this process at this moment: fields of :class:`Summary`.

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


def measured(summaries: Sequence[Summary]) -> list[tuple[str, str]]:
    """Return name and text of what a comparison was measured with; values that some rows alone have are counted."""
    dates = sorted(summary.date for summary in summaries if summary.date is not None)
    period = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
    found = [
        ("model", _counted(summaries, _weights)),
        (
            "versions",
            _counted(summaries, lambda summary: ", ".join(f"{name} {one}" for name, one in summary.versions.items())),
        ),
        ("hardware", _counted(summaries, _hardware)),
        ("date", _counted(summaries, lambda summary: UNKNOWN if summary.date is None else period)),
        ("command", _counted(summaries, lambda summary: summary.command or UNKNOWN)),
    ]
    return [(name, text) for name, texts in found for text in texts]


def prompts(summaries: Iterable[Summary]) -> str:
    """Say how long the samples of a task are, and with which options it was run."""
    summary = next((summary for summary in summaries if summary.prompt_mean is not None), None)
    if summary is None:
        return f"prompts: {UNKNOWN}; options: {UNKNOWN}"
    spread = (
        ""
        if summary.prompt_min == summary.prompt_max
        else f" on average ({summary.prompt_min} to {summary.prompt_max})"
    )
    options = ", ".join(f"{name}={_plain(one)}" for name, one in (summary.task_options or {}).items())
    return f"prompts: {summary.prompt_mean:g} tokens{spread}; options: {options or 'none'}"


def _weights(summary: Summary) -> str:
    dtype = summary.dtype or f"dtype {UNKNOWN}"
    return f"{summary.model}, {dtype}" + (
        f", {summary.quantization}" if summary.quantization not in (None, "none") else ""
    )


def _hardware(summary: Summary) -> str:
    threads = (
        "" if summary.threads is None else f", {summary.threads} {'thread' if summary.threads == 1 else 'threads'}"
    )
    return (summary.hardware or UNKNOWN) + threads


def _counted(summaries: Sequence[Summary], say: Callable[[Summary], str]) -> list[str]:
    texts = [say(summary) for summary in summaries]
    several = len(set(texts)) > 1
    return [
        f"{text} ({texts.count(text)} of {len(summaries)} rows)" if several else text for text in dict.fromkeys(texts)
    ]


def _plain(value: Any) -> str:
    return f"[{','.join(map(_plain, value))}]" if isinstance(value, list) else str(value)
