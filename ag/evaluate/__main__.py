"""Compare what caches keep: ``python -m ag.evaluate run=RUN policies=[full,gates,h2o] budgets=[0.5,0.25]``."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from torch import nn

from ag import data, export, models
from ag.cli import parse
from ag.config import Config, DataConfig, ModelConfig, key
from ag.configure import load_config
from ag.engine import Policy, policy
from ag.engine.spec import BUDGET, PolicySpec, parse_budget
from ag.errors import UserError
from ag.evaluate import Scores, score_responses
from ag.evaluate.comparison.statistics import mean_and_error


@dataclass
class EvaluateConfig:
    """What ``python -m ag.evaluate`` can be told."""

    run: str | None = key(None, "run folder of ag.fit: its model, export and data")
    model: str = key("smollm2", "without a run: hub id, local folder, or the alias smollm2")
    root: str | None = key(None, "local folder of the data (a run has one; without a run: of plain documents)")
    policies: list[str] = key(["full", "gates"], "what to compare; gates are those of the run")
    budgets: list[Any] = key([], "what policies that need a budget keep", words=f"list of {BUDGET}")
    schedule: str = key("prefill", "when something is evicted, for policies with a budget")
    samples: int | None = key(None, "validate on the first N rows or documents, instead of the run's number", low=1)
    prompt: int | None = key(None, "tokens of each prompt, instead of the run's (plain documents)", low=1)
    continuation: int | None = key(None, "tokens scored after it, instead of the run's (plain documents)", low=1)
    batch_size: int | None = key(None, "rows or questions at once, instead of the run's number", low=1)
    output: str | None = key(None, "JSON file for the results; a run's default is its evaluation.json")
    device: str = key("cpu", "cpu, cuda, cuda:1, ...")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2: one line on stderr says what is wrong)."""
    config = parse(sys.argv[1:] if argv is None else argv, EvaluateConfig, "ag.evaluate").config
    try:
        results = evaluate(config)
    except UserError as error:
        print(f"ag.evaluate: error: {error}", file=sys.stderr)
        return 2
    Console().print(table(results))
    return 0


def evaluate(config: EvaluateConfig) -> dict[str, Scores]:
    """Score held-out responses under each policy and budget.

    Raises:
        UserError: (ConfigError, DataError, ...) naming what is wrong with the run or a policy, and the fix.
    """
    recipe = _recipe(config)
    plan = _plan(config, recipe)  # unknown names and bad budgets are found before a model is loaded
    base, tokenizer = models.load_base(recipe.model, device=config.device)
    model: nn.Module = base
    batches = data.build(recipe, tokenizer, base.config.get_text_config().max_position_embeddings)
    if config.run is not None and recipe.train == "lora":
        model = PeftModel.from_pretrained(base, str(Path(config.run) / "export" / "adapter"))
    elif config.run is not None and recipe.train == "gates+lora":
        model = export.load_adapter(base, Path(config.run) / "export")
    scores = score_responses(model.eval(), batches.val_dataloader(), list(plan.values()))
    results = dict(zip(plan, scores, strict=True))
    output = config.output or (Path(config.run) / "evaluation.json" if config.run else None)
    if output is not None:
        text = json.dumps({name: asdict(scores) for name, scores in results.items()}, indent=2)
        Path(output).write_text(text)
    return results


def _recipe(config: EvaluateConfig) -> Config:
    """Return the run's configuration, or one for plain documents, with what was given put in."""
    if config.run is not None:
        recipe = load_config(Path(config.run) / "config.yaml", Config)
    elif config.root is None:
        raise UserError("nothing to evaluate on: give run=RUN, or root=FOLDER of plain documents.")
    else:
        recipe = Config(model=ModelConfig(name=config.model), data=DataConfig(kind="text", name="documents"))
    part = recipe.data
    if part.packing == "packed":
        raise UserError(f"{config.run}: packed text has no prompts to evict; evaluate with root=FOLDER and no run.")
    part.root = config.root or part.root
    part.val_samples = config.samples or part.val_samples
    part.val_batch_size = config.batch_size or part.val_batch_size
    if config.prompt is not None:
        part.prompt_min = part.prompt_max = config.prompt
    part.continuation = config.continuation or part.continuation
    part.max_length = max(part.max_length, part.prompt_max + part.continuation)
    part.train_samples = part.batch_size = 1  # they are read, and not used
    return recipe


def _plan(config: EvaluateConfig, recipe: Config) -> dict[str, Policy]:
    """Return the policies by the name of their row."""
    trained = config.run is not None and recipe.train != "lora"
    plan: dict[str, Policy] = {}
    budgets = [parse_budget(budget) for budget in config.budgets]
    for text in config.policies:
        spec = PolicySpec.parse(text)
        if spec.reads_gates and spec.path is None:
            if not trained and config.policies == ["full", "gates"]:
                continue  # the default, where there are none
            if not trained:
                raise UserError(f"policy {text!r}: there are no gates; give run=RUN of a run that trained some.")
            spec = replace(spec, path=f"{config.run}/export")
        if spec.bare:
            plan[text if spec.evicts else "full cache"] = policy(spec)
        for budget in budgets if spec.evicts else ():
            plan[f"{text} {budget}"] = policy(spec, budget, config.schedule)
        if not spec.bare and not budgets:
            raise UserError(f"policy {text!r} needs budgets=[...]: shares of the prompt such as 0.25, or tokens.")
    return plan


def table(results: dict[str, Scores]) -> Table:
    """Return the table that the command prints; differences are paired, with their standard error."""
    first = next(iter(results.values()))
    out = Table(title=f"{len(first.losses)} held-out responses")
    for column in ("cache", "loss", "difference", "accuracy", "evicted", "KV bytes"):
        out.add_column(column, justify="left" if column == "cache" else "right")
    for name, scores in results.items():
        out.add_row(
            name,
            f"{scores.loss:.4f}",
            "" if scores is first else "{:+.4f} +- {:.4f}".format(*paired_difference(scores, first)),
            "" if scores.accuracy is None else f"{scores.accuracy:.1%}",
            f"{1 - scores.kept:.1%}",
            f"{scores.kv_bytes:,}",
        )
    return out


def paired_difference(scores: Scores, other: Scores) -> tuple[float, float]:
    """Return the mean of the losses' differences, response by response, and its standard error."""
    differences = [mine - theirs for mine, theirs in zip(scores.losses, other.losses, strict=True)]
    mean, error = mean_and_error(differences)
    return mean, math.nan if error is None else error


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    sys.exit(main())
