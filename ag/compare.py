"""``python -m ag.compare``: see :mod:`ag.commands.compare`."""

from ag.commands.compare import CompareConfig as CompareConfig
from ag.commands.compare import main as main

if __name__ == "__main__":
    raise SystemExit(main())
