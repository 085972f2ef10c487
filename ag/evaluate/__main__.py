"""``python -m ag.evaluate``: see :mod:`ag.commands.evaluate`."""

import sys

from ag.commands.evaluate import EvaluateConfig as EvaluateConfig
from ag.commands.evaluate import main as main

if __name__ == "__main__":
    sys.exit(main())
