"""Keys that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ag.config.sections import key
from ag.plugins import load

MODEL = "hub id, local folder, alias (smollm2, gemma3-270m), or random:llama-8b (random:PATH.json): random weights"


@dataclass
class Shared:
    """The keys of every command that runs a policy."""

    plugins: list[str] = key(
        [], "modules to import first, which add scorers, wrappers, allocators or tasks of your own"
    )
    device: str = key("cpu", "cpu, cuda, cuda:1, ...")

    def __post_init__(self) -> None:
        load(self.plugins)


@dataclass
class SharedDtype(Shared):
    """The keys of a command that loads a model itself."""

    dtype: Literal["float32", "bfloat16", "float16"] = key("float32", "data type of the model's weights")


@dataclass
class SharedModel(SharedDtype):
    """The keys of a command that names this model itself."""

    model: str = key("smollm2", MODEL)
