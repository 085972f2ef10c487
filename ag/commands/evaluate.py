"""A run's gates on its own validation rows: ``python -m ag.evaluate run=RUN policies=[full,gates,h2o] budgets=[0.5]``.

``ag.compare`` with the task ``responses``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ag.cluster import CLUSTER
from ag.commands.shared import MODEL, KVDtype, Shared
from ag.config.command_line import keyed
from ag.config.sections import BUDGET, key


@dataclass
class EvaluateConfig(Shared):
    """The keys of ``python -m ag.evaluate``."""

    run: str | None = key(None, "run folder of ag.fit, for its model, export and data", holds="folder")
    model: str = key("smollm2", f"without a run: {MODEL}")
    root: str | None = key(
        None, "local folder of the data: a run names its own; without a run: plain documents", holds="folder"
    )
    policies: list[str] | None = key(
        None,
        "policies to compare; flags and gates are those of the run; null means full, flags, and with budgets gates",
    )
    budgets: list[Any] = key(
        [], "what policies keep, gates included; full and flags take no budget", words=f"list of {BUDGET}"
    )
    schedule: str = key("prefill", "when tokens are evicted, for policies with a budget")
    kv_dtypes: list[KVDtype] = key(["float"], "how every policy stores keys and values: float (the model's type), int8")
    samples: int | None = key(None, "validate on the first N rows or documents, instead of the run's number", low=1)
    prompt: int | None = key(None, "tokens of each prompt, instead of the run's (plain documents)", low=1)
    continuation: int | None = key(None, "tokens scored after it, instead of the run's (plain documents)", low=1)
    output: str | None = key(
        None,
        "FILE.json for the figures; the folder FILE has all else; null means RUN/evaluation.json",
        holds="output",
    )
    cluster: str | None = key(None, CLUSTER)

    @property
    def file(self) -> Path:
        """The file of the figures."""
        return Path(self.output) if self.output else Path(self.run or "runs") / "evaluation.json"


main = keyed("ag.evaluate", EvaluateConfig, "ag.evaluate.preset:run")
