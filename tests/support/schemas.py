"""Two schemas and how a command line is read into each."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ag.config import Config
from ag.config.command_line import parse
from ag.config.keys import keys

KEYS = keys(Config)


@dataclass
class Inner:
    budget: int | float | None = field(default=0.5, metadata={"doc": "tokens or share"})
    names: list[Literal["a", "b"]] = field(default_factory=lambda: ["a"], metadata={"doc": "names"})


@dataclass
class Other:
    """A schema as another program might have it: a required key, no recipes."""

    prompt: str = field(metadata={"doc": "what to continue"})
    options: dict[str, Any] = field(default_factory=dict, metadata={"doc": "anything"})
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.prompt == "forbidden":
            raise ValueError("prompt=forbidden: expected another one")


def fit(*argv: str) -> Config:
    return parse(argv, Config, "ag.fit").config


def other(*argv: str) -> Other:
    return parse(argv, Other, "ag.other").config
