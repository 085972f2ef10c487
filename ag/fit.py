"""``python -m ag.fit``: see :mod:`ag.commands.fit`."""

import sys

from ag.commands.fit import main as main

if __name__ == "__main__":
    sys.exit(main())
