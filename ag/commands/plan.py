"""Memory and time of a training step: ``python -m ag.plan recipe=NAME tflops=70``; its keys are a recipe's keys."""

from __future__ import annotations

from dataclasses import dataclass

from ag.config import Config
from ag.config.command_line import main_from_schema
from ag.config.sections import key


@dataclass
class PlanConfig(Config):
    """The keys of a planned run, and the speed of its devices."""

    tflops: float | None = key(
        None, "10^12 operations per second of one device; null means measured on matrix products here", ge=1e-6
    )


main = main_from_schema("ag.plan", PlanConfig, "ag.plan:show", elsewhere=True)
