"""Continue a text, or answer a chat, under a policy: ``python -m ag.generate policy=h2o budget=0.25 prompt=TEXT``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ag.commands.shared import SharedPolicy
from ag.config.command_line import keyed
from ag.config.sections import key, mapping


@dataclass
class GenerateConfig(SharedPolicy):
    """The keys of ``python -m ag.generate``."""

    prompt: str | None = key(None, "the text to continue")
    file: str | None = key(None, "file with that text, instead of prompt", holds="file")
    chat: bool = key(False, "put the text into the tokenizer's chat template, as a user's message")
    messages: str | None = key(
        None,
        "JSON file with a chat to answer, instead of prompt: messages, or an object with messages and tools",
        holds="file",
    )
    template: dict[str, Any] = mapping("variables of the chat template, as template.enable_thinking=false")
    protect: list[str] = key(
        [],
        "tokens of the prompt that are never evicted: spans such as 0-40; of a chat template (what it adds) and system",
    )
    max_new_tokens: int = key(64, "longest continuation in tokens", low=1)
    temperature: float = key(0.0, "0: always the likeliest token; above: sample at this temperature", low=0)
    top_p: float = key(1.0, "sample from the likeliest tokens that together have this probability", low=0, high=1)
    seed: int = key(0, "seed of the samples", low=0, high=2**32 - 1)
    compare: bool = key(False, "continue with a full cache as well")


main = keyed("ag.generate", GenerateConfig, "ag.continuation:run")
