"""``python -m ag.serve``: see :mod:`ag.commands.serve`."""

from ag.commands.serve import ServeConfig as ServeConfig
from ag.commands.serve import main as main

if __name__ == "__main__":
    raise SystemExit(main())
