"""``python -m ag.fit``: see :mod:`ag.commands.fit`."""

from ag.commands.fit import main as main

if __name__ == "__main__":
    raise SystemExit(main())
