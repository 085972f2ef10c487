"""``python -m ag.report``: see :mod:`ag.commands.report`."""

from ag.commands.report import ReportConfig as ReportConfig
from ag.commands.report import main as main

if __name__ == "__main__":
    raise SystemExit(main())
