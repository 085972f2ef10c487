"""The command ``ag``: ``ag fit ...`` is ``python -m ag.fit ...``."""

from __future__ import annotations

import runpy
import sys

import ag
from ag.errors import nearest

COMMANDS = {
    "fit": "train gates, adapters, or both: ag fit recipe=quickstart",
    "plan": "memory and time of a training step, without weights or a GPU",
    "generate": "continue a text under a policy, and show what it saves",
    "serve": "a server with OpenAI's API and continuous batching",
    "compare": "policies on tasks at budgets: tables, tests and a page",
    "choose": "the smallest budget whose cost on your own data stays below a bound",
    "report": "join finished comparisons: tables, figures and a page",
    "evaluate": "a run's gates on its own validation rows",
    "explain": "pictures of what policies keep, and why",
    "bench": "time and memory beside plain transformers",
    "data": "sample data for a first try: ag data sample FOLDER",
    "doctor": "whether this machine is ready, and what to do where it is not",
    "models": "folder of a base model; fetches it if needed",
    "completion": "a script that completes these words in bash or zsh",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command, or list the commands; returns the exit code, 2 for an unknown command."""
    words = sys.argv[1:] if argv is None else argv
    name = words[0] if words else "--help"
    if name in COMMANDS:
        sys.argv = [f"ag {name}", *words[1:]]
        runpy.run_module(f"ag.{name}", run_name="__main__", alter_sys=True)  # as python -m does; raises SystemExit
    elif name == "--version":
        print(f"ag {ag.__version__}")
    elif name in ("-h", "--help"):
        print("ag COMMAND [options] key=value ...; ag COMMAND --help lists its keys\n")
        print(*(f"  {command:<12}{line}" for command, line in COMMANDS.items()), sep="\n")
    else:
        expected = f"{', '.join(COMMANDS)}{nearest(name, COMMANDS)}"
        print(f"ag: error: unknown command {name!r}: expected one of {expected}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
