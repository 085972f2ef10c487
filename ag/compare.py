"""What to evict with, at my budget, on my tasks: ``python -m ag.compare policies=[full,h2o] budgets=[0.25]``."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from ag.cli import parse
from ag.config import key, mapping
from ag.configure import dump
from ag.engine.spec import BUDGET
from ag.errors import UserError
from ag.evaluate.cells import plan
from ag.evaluate.report import Comparison, terminal_table, write
from ag.evaluate.results import CorruptRowWarning, Results
from ag.evaluate.work import fill


@dataclass
class CompareConfig:
    """What ``python -m ag.compare`` can be told."""

    recipe: str = key("compare", "name of a shipped recipe, or path of a YAML file: where the values start from")
    model: str = key("smollm2", "hub id, local folder, or the alias smollm2")
    revision: str | None = key(None, "git revision of a hub model")
    dtype: Literal["float32", "bfloat16", "float16"] = key("float32", "data type of the model's weights")
    adapter: str | None = key(None, "export whose LoRA adapter every policy runs with")
    policies: list[str] = key(["full", "h2o", "snapkv"], "what to compare, such as snapkv+caote or gates:EXPORT")
    budgets: list[Any] = key([], "what policies that need a budget keep", words=f"list of {BUDGET}")
    schedule: str = key("prefill", "when something is evicted, for policies with a budget")
    tasks: list[str] = key(["ppl"], "what to compare on")
    root: str | None = key(None, "local folder of the data, with a folder for each task; null: the hub")
    roots: dict[str, str] = mapping("folders of single tasks, as roots.TASK=FOLDER")
    samples: int | None = key(None, "the first N samples of each task that can be run", low=1)
    max_tokens: int | None = key(None, "longest sample in tokens, instead of the model's context", low=1)
    task_options: dict[str, dict[str, Any]] = mapping("options of tasks, as task_options.TASK.OPTION=VALUE")
    policy_options: dict[str, dict[str, Any]] = mapping("options of policies, as policy_options.POLICY.OPTION=VALUE")
    baseline: str = key("full", "the policy that the others are tested against, at its own or the same budget")
    together: int = key(8, "cells of a task that share the reading of a prompt, where their policies allow it", low=1)
    seed: int = key(0, "seed of generated samples", low=0, high=2**32 - 1)
    device: str = key("cpu", "cpu, cuda, cuda:1, ...; processes on several may share an output folder")
    output: str | None = key(None, "folder of the results, resumed when it has some; null: runs/RECIPE")
    retry: bool = key(False, "run the cells again that ended without a result")
    view_samples: int = key(2, "samples of each task whose kept tokens the report shows", low=0)
    view_tokens: int = key(1024, "tokens of each of them", low=1)

    def __post_init__(self) -> None:
        if self.baseline not in self.policies:
            raise ValueError(f"baseline={self.baseline}: expected one of policies={self.policies}")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2: one line on stderr says what is wrong)."""
    invocation = parse(sys.argv[1:] if argv is None else argv, CompareConfig, "ag.compare")
    console = Console()
    try:
        if invocation.dry_run:
            print(*(cell.name for cell in plan(invocation.config)), sep="\n")
            return 0
        comparison = compare(invocation.config, console)
    except UserError as error:
        print(f"ag.compare: error: {error}", file=sys.stderr)
        return 2
    console.print(terminal_table(comparison))
    for task in comparison.tasks:
        console.print(f"{task}: {comparison.counted(task)}", soft_wrap=True)
    console.print(f"{comparison.folder / 'report.html'}", soft_wrap=True)
    return 0


def compare(config: CompareConfig, console: Console) -> Comparison:
    """Fill the cells that are missing in the output folder, and write its table, plots and page.

    Raises:
        UserError: naming what is wrong with a policy, a task, the model or the data, and the fix.
    """
    cells = plan(config)
    results = Results(Path(config.output or f"runs/{config.recipe}"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CorruptRowWarning)
        rows = fill(config, cells, results, console)
    for warning in caught:
        console.print(f"warning: {warning.message}", soft_wrap=True)
    comparison = Comparison.of(config, cells, rows, results)
    (results.folder / "config.yaml").write_text(dump(config))
    write(comparison)
    return comparison


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    sys.exit(main())
