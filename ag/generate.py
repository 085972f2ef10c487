"""``python -m ag.generate``: see :mod:`ag.commands.generate`."""

from ag.commands.generate import GenerateConfig as GenerateConfig
from ag.commands.generate import main as main

if __name__ == "__main__":
    raise SystemExit(main())
