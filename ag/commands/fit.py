"""Train: ``python -m ag.fit recipe=NAME key=value ...``; its keys are those of a recipe."""

from __future__ import annotations

from ag.config import Config
from ag.config.command_line import keyed


def check(config: Config) -> None:
    """Refuse folders without the rows to train on, where this machine reads them."""
    from ag.data import early

    if config.cluster in (None, "local"):
        early.check(config.data)


main = keyed("ag.fit", Config, "ag.run:run", check=check)
