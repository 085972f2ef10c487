"""``python -m ag.explain``: see :mod:`ag.commands.explain`."""

from ag.commands.explain import ExplainConfig as ExplainConfig
from ag.commands.explain import main as main

if __name__ == "__main__":
    raise SystemExit(main())
