"""Measure speed and memory: ``python -m ag.bench decode context=[2048,8192] keep=[0.2]``.

``python -m ag.bench report OUT...`` folds what ``scripts/gpu.sh`` wrote.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from ag.bench.config import MODES, BenchConfig
from ag.config.command_line import command, parse
from ag.errors import UserError


@command("ag.bench")
def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code (2: one line on stderr says what is wrong)."""
    if argv[:1] == ["report"]:
        from ag.bench.card import summary

        return summary.main(argv[1:])
    config = parse(named(argv), BenchConfig, "ag.bench").config
    # these load torch and transformers, which no help needs
    from torch import OutOfMemoryError

    from ag.bench.run import bench
    from ag.bench.write import markdown, write

    try:
        results = bench(config, shlex.join(["python", "-m", "ag.bench", *argv]))
    except OutOfMemoryError as error:
        raise UserError(f"{str(error).splitlines()[0]} Give a smaller context or batch.") from error
    paths = write(Path(config.output), config.mode, results)
    print(markdown(results))
    print("written:", *paths)
    return 0


def named(words: list[str]) -> list[str]:
    """Write a mode that stands as the first word as ``mode=...``."""
    return [f"mode={words[0]}", *words[1:]] if words and words[0] in MODES else words


if __name__ == "__main__":
    sys.exit(main())
