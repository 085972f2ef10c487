"""``python -m ag.compare``: see :mod:`ag.commands.compare`."""

import sys

from ag.commands.compare import CompareConfig as CompareConfig
from ag.commands.compare import main as main

if __name__ == "__main__":
    sys.exit(main())
