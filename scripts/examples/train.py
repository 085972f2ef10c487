"""Train gates on generated passages: python scripts/examples/train.py OUTPUT [key=value ...]."""

import sys

from ag.config import Config
from ag.config.recipes import resolve
from ag.run import fit

overrides = dict(word.split("=", 1) for word in sys.argv[2:])
config = resolve(Config, {"recipe": "quickstart", "output": sys.argv[1]} | overrides)
run = fit(config)
print(f"gates: {run}/export")
