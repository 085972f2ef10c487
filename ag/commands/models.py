"""Print the folder of a base model, and fetch the model if needed: ``python -m ag.models smollm2``."""

from __future__ import annotations

from dataclasses import dataclass

from ag.config.command_line import main_from_schema
from ag.config.sections import key

MODEL = "smollm2, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b, gemma3-270m, a hub id or a folder; may also be the first word"


@dataclass
class ModelsConfig:
    """The keys of ``python -m ag.models``."""

    model: str = key("smollm2", MODEL)
    accept_license: str | None = key(
        None, "the licence that you accept, after which the model is downloaded (gemma3-270m: gemma)"
    )


main = main_from_schema("ag.models", ModelsConfig, "ag.models:show", first="model")
