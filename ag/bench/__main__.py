"""``python -m ag.bench``: see :mod:`ag.commands.bench`; ``report OUT...`` folds what ``scripts/gpu.sh`` wrote."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import ag
from ag.commands.bench import main as measure
from ag.config.command_line import command
from ag.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    return report(words[1:]) if words[:1] == ["report"] else measure(words)


@command("ag.bench")
def report(words: list[str]) -> int:
    """Run the report of the checkout that this package lies in; returns the exit code."""
    checkout = Path(ag.__file__).resolve().parents[1]
    if not (checkout / "scripts" / "gpu").is_dir():
        raise UserError("report: expected a checkout of the repository, whose pages it writes; give the command there.")
    sys.path.insert(0, str(checkout))
    return int(import_module("scripts.gpu.summary").main(words))


if __name__ == "__main__":
    sys.exit(main())
