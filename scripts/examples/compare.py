"""Compare policies on texts of your own: python scripts/examples/compare.py MODEL FOLDER OUTPUT."""

import sys

from rich.console import Console

from ag.commands.compare import CompareConfig
from ag.evaluate.comparison.compare import compare

model, folder, output = sys.argv[1:]
config = CompareConfig(
    model=model,
    policies=["full", "h2o", "streaming_llm"],
    budgets=[0.5, 0.25],
    tasks=["ppl"],
    task_options={"ppl": {"prompt": 64, "continuation": 16}},
    root=folder,  # with the texts in corpus/validation.jsonl
    output=output,
)
for result in compare(config, Console(stderr=True)).results:
    summary, paired = result.summary, result.paired
    print(f"{result.name}: {summary.kept:.0%} kept, {summary.mean:.3f} {summary.metric}", end="")
    print("" if paired is None else f", {paired.difference:+.3f} [{paired.low:+.3f}, {paired.high:+.3f}] to full")
