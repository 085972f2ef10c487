"""What ``python -m ag.evaluate`` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ag.config.sections import BUDGET, key
from ag.plugins import load


@dataclass
class EvaluateConfig:
    """What ``python -m ag.evaluate`` can be told."""

    run: str | None = key(None, "run folder of ag.fit: its model, export and data")
    model: str = key("smollm2", "without a run: hub id, local folder, or the alias smollm2 or gemma3-270m")
    root: str | None = key(None, "local folder of the data (a run has one; without a run: of plain documents)")
    policies: list[str] | None = key(
        None,
        "what to compare; flags and gates are those of the run; null: full, flags, and gates where there are budgets",
    )
    budgets: list[Any] = key([], "what policies keep that can be told, so also gates", words=f"list of {BUDGET}")
    schedule: str = key("prefill", "when something is evicted, for policies with a budget")
    samples: int | None = key(None, "validate on the first N rows or documents, instead of the run's number", low=1)
    prompt: int | None = key(None, "tokens of each prompt, instead of the run's (plain documents)", low=1)
    continuation: int | None = key(None, "tokens scored after it, instead of the run's (plain documents)", low=1)
    output: str | None = key(
        None, "FILE.json for the figures, with the folder FILE for all else; null: RUN/evaluation.json"
    )
    plugins: list[str] = key(
        [], "modules to import first, which add scorers, wrappers, allocators or tasks of your own"
    )
    device: str = key("cpu", "cpu, cuda, cuda:1, ...")

    def __post_init__(self) -> None:
        load(self.plugins)

    @property
    def file(self) -> Path:
        """Where the figures go."""
        return Path(self.output) if self.output else Path(self.run or "runs") / "evaluation.json"
