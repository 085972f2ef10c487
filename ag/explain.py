"""Pictures of what policies keep and why: ``python -m ag.explain gates=EXPORT root=DATA``."""

from __future__ import annotations

import sys

from ag.config.command_line import command, parse
from ag.config.explain import ExplainConfig as ExplainConfig


@command("ag.explain")
def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code (2: one line on stderr says what is wrong)."""
    config = parse(argv, ExplainConfig, "ag.explain").config
    from ag.evaluate.pictures import explain  # loads torch and transformers, which no help needs

    for path in explain(config, print):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
