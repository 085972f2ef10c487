"""Continue a text under a policy: ``python -m ag.generate policy=h2o budget=0.25 prompt=TEXT``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ag.commands.shared import SharedDtype
from ag.config.command_line import keyed
from ag.config.sections import BUDGET, key, mapping


@dataclass
class GenerateConfig(SharedDtype):
    """The keys of ``python -m ag.generate``."""

    gates: str | None = key(None, "folder of exported gates, which a policy named gates or flags uses")
    policy: str | None = key(None, "what to evict, such as h2o or gates; null: gates where there are some, else full")
    budget: Any = key(None, "what the policy keeps", words=f"{BUDGET} | null")
    schedule: str = key("prefill", "when something is evicted: prefill, blocks:m, every, steps:n, joined by +")
    options: dict[str, Any] = mapping("options of the policy, as options.window=16")
    adapter: bool = key(True, "put the export's LoRA adapter on the model; false: it is merged into the model already")
    model: str | None = key(None, "hub id, local folder or alias, instead of the base model that the export names")
    prompt: str | None = key(
        None, "the text to continue", instead="put a text with these signs into a file and give file=PATH"
    )
    file: str | None = key(None, "file with that text, instead of prompt")
    chat: bool = key(False, "put the text into the tokenizer's chat template, as a user's message")
    max_new_tokens: int = key(64, "longest continuation in tokens", low=1)
    temperature: float = key(0.0, "0: always the likeliest token; above: sample at this temperature", low=0)
    top_p: float = key(1.0, "sample from the likeliest tokens that together have this probability", low=0, high=1)
    seed: int = key(0, "seed of the samples", low=0, high=2**32 - 1)
    compare: bool = key(False, "continue with a full cache as well")


main = keyed("ag.generate", GenerateConfig, "ag.continuation:run")
