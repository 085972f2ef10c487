"""Train: ``python -m ag.fit recipe=NAME key=value ...``; its keys are a recipe's keys."""

from __future__ import annotations

from ag.config import Config
from ag.config.command_line import main_from_schema


def check(config: Config) -> None:
    """Refuse folders without training rows, if this machine reads them."""
    from ag.data import early

    if config.cluster in (None, "local"):
        early.check(config.data)


main = main_from_schema("ag.fit", Config, "ag.run:run", check=check)
