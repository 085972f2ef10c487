"""``python -m ag.choose``: see :mod:`ag.commands.choose`."""

from ag.commands.choose import ChooseConfig as ChooseConfig
from ag.commands.choose import main as main

if __name__ == "__main__":
    raise SystemExit(main())
