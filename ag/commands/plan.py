"""Memory and time of a training step: ``python -m ag.plan recipe=NAME tflops=70``; its keys are a recipe's keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ag.config import Config
from ag.config.command_line import main_from_schema
from ag.config.sections import key
from ag.errors import UserError
from ag.hardware import CARDS, Card

GPU = "NAME or GIB, and xN for several, as 4090x4 or 24GiB"


@dataclass
class PlanConfig(Config):
    """The keys of a planned run, and the memory and speed of its devices."""

    gpu: str | None = key(
        None, f"the device: says whether a step fits, and sets trainer.devices; null means no answer ({GPU})"
    )
    tflops: float | Literal["here"] | None = key(
        None,
        "10^12 operations per second of one device in training; here means measured on matrix products of this "
        "machine, which bounds the time from below; null means that the plan has no time",
    )
    share: float | None = key(
        None,
        "share of each prompt that a server on the device of gpu= keeps: tells how many requests it holds; null means "
        "that the plan has no line about a server",
        ge=1e-6,
        le=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.tflops, float | int) and not self.tflops > 0:
            raise ValueError(f"tflops={self.tflops:g}: expected a number above 0, or here")
        if self.share is not None and self.gpu is None:
            raise ValueError(f"share={self.share:g}: expected gpu= with it, the device of the server")
        name, count = (None, None) if self.gpu is None else _split(self.gpu)
        if count is not None:
            devices = self.trainer.devices
            if self.resume is not None and devices != int(count):
                raise ValueError(
                    f"gpu={self.gpu} with trainer.devices={devices} and resume={self.resume}: a run keeps its number "
                    f"of devices: expected gpu={name}x{devices} or gpu={name}"
                )
            self.trainer.devices = int(count)

    @property
    def card(self) -> Card | None:
        """The device of ``gpu``. None: none is given."""
        if self.gpu is None:
            return None
        name, _ = _split(self.gpu)
        size = re.fullmatch(r"(\d+(?:\.\d+)?)gi?b", name)
        return Card(name if size is None else f"{size[1]} GiB", CARDS[name] if size is None else float(size[1]))


def _split(text: str) -> tuple[str, str | None]:
    """Return the name of a card and the number of cards, None without one; refuse an unknown card."""
    match = re.fullmatch(r"(.+?)(?:x([1-9]\d*))?", text.lower().removeprefix("rtx"))
    if match is None or (match[1] not in CARDS and not re.fullmatch(r"\d+(\.\d+)?gi?b", match[1])):
        raise UserError(f"gpu={text}: expected {GPU}; names are {', '.join(CARDS)}.")
    return match[1], match[2]


main = main_from_schema("ag.plan", PlanConfig, "ag.plan:show", elsewhere=True)
