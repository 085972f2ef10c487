"""``python -m ag.bench``: see :mod:`ag.commands.bench`."""

import sys

from ag.commands.bench import BenchConfig as BenchConfig
from ag.commands.bench import main as main

if __name__ == "__main__":
    sys.exit(main())
