"""``python -m ag.bench``: see :mod:`ag.commands.bench`; ``report OUT...`` folds what ``scripts/gpu.sh`` wrote."""

from __future__ import annotations

import sys

from ag.commands.bench import main as measure


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["report"]:
        from ag.bench.card import summary

        return summary.main(words[1:])
    return measure(words)


if __name__ == "__main__":
    sys.exit(main())
