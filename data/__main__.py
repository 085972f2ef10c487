"""``ag data sample FOLDER`` writes generated data, with which the commands of the README run offline."""

from __future__ import annotations

import sys
from pathlib import Path

from ag.config.command_line import command
from ag.errors import UserError

USAGE = """python -m ag.data sample FOLDER

Writes generated documents, books and questions into a new folder, which other commands take as root=FOLDER."""


@command("ag.data")
def main(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    if words in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if len(words) != 2 or words[0] != "sample":
        raise UserError(f"{' '.join(words) or 'no words'}: expected {USAGE.splitlines()[0]}")
    from ag.data.sample_folder import write  # takes seconds

    print(*write(Path(words[1])), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
