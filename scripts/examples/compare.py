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
for row in compare(config, Console(stderr=True)).results:
    print(f"{row.name}: {row.kept:.0%} kept, {row.mean:.3f} {row.metric}", end="")
    difference = f", {row.difference:+.3f} [{row.difference_low:+.3f}, {row.difference_high:+.3f}] to full"
    print(difference if row.evicts else "")
