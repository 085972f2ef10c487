"""Compare the full cache with the gates of a run: ``python -m ag.evaluate run=RUN``."""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from torch import nn

from ag import data, export, models
from ag.cli import parse
from ag.config import Config, key
from ag.configure import load_config
from ag.errors import UserError
from ag.evaluate import Scores, score_responses


@dataclass
class EvaluateConfig:
    """What ``python -m ag.evaluate`` can be told."""

    run: str = key("???", "run folder of ag.fit, with an export")
    root: str | None = key(None, "local folder of the data, instead of the run's data.root")
    samples: int | None = key(None, "validate on the first N rows or documents, instead of the run's number", low=1)
    batch_size: int | None = key(None, "rows or questions at once, instead of the run's number", low=1)
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
    """Score the validation responses of a run with a full cache and with its gates.

    The results are also written to ``evaluation.json`` in the run folder.

    Raises:
        UserError: (ConfigError, DataError, ...) naming what is wrong with the run and the fix.
    """
    run = Path(config.run)
    recipe = load_config(run / "config.yaml", Config)
    recipe.data.root = config.root or recipe.data.root
    recipe.data.val_samples = config.samples or recipe.data.val_samples
    recipe.data.val_batch_size = config.batch_size or recipe.data.val_batch_size
    recipe.data.train_samples = recipe.data.train_samples or recipe.data.batch_size  # it is not used
    if recipe.data.packing == "packed":
        raise UserError(f"{run}: packed text has no prompts to evict; evaluate with data.packing=split.")
    base, tokenizer = models.load_base(recipe.model, device=config.device)
    model: nn.Module = base
    batches = data.build(recipe, tokenizer, base.config.get_text_config().max_position_embeddings)
    folder = run / "export"
    if recipe.train == "lora":
        model = PeftModel.from_pretrained(base, str(folder / "adapter"))
    elif recipe.train == "gates+lora":
        model = export.load_adapter(base, folder)
    policies = {"full cache": "full"} | ({"gates": f"gates:{folder}"} if recipe.train != "lora" else {})
    results = {
        name: score_responses(model.eval(), batches.val_dataloader(), policy) for name, policy in policies.items()
    }
    text = json.dumps({name: asdict(scores) for name, scores in results.items()}, indent=2)
    (run / "evaluation.json").write_text(text)
    return results


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
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    return statistics.fmean(differences), error


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    sys.exit(main())
