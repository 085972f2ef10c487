"""Train: ``python -m ag.fit recipe=NAME key=value ...``; its keys are those of a recipe."""

from __future__ import annotations

from ag.config import Config
from ag.config.command_line import keyed

main = keyed("ag.fit", Config, "ag.run:run")
