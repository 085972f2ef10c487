"""The file ``choice.json``: a policy and a budget that ``ag.choose`` found, for other commands."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ag.config.keys import keys
from ag.errors import UserError


@dataclass(frozen=True)
class Choice:
    """What a command takes from a choice."""

    model: str  # name or folder of the base model
    policy: str  # with the export of the gates if it reads any
    budget: int | float  # share of each prompt, or tokens per KV head
    schedule: str = "prefill"  # when tokens are evicted
    options: dict[str, Any] = field(default_factory=dict)  # options of the policy by name
    gates: str | None = None  # export whose LoRA adapter the model had, if the policy names none
    revision: str | None = None  # git revision of the model on the hub; None: the newest, or a folder
    quantization: str = "none"  # of the model's weights: none or nf4

    @classmethod
    def read(cls, path: str) -> Choice:
        """Read a file that ``ag.choose`` wrote.

        Raises:
            UserError: the file cannot be read or is no choice, or nothing held.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"choice={path}: {error}; expected a file that ag.choose wrote.") from error
        if not isinstance(content, dict) or "choice" not in content:
            raise UserError(f"choice={path}: no key choice: expected a file that ag.choose wrote.")
        chosen = content["choice"]
        if chosen is None:
            raise UserError(f"choice={path}: nothing held in it: expected a file with a choice; use policy=full.")
        expected = keys(cls)
        if not isinstance(chosen, dict) or chosen.keys() != expected.keys():
            raise UserError(f"choice={path}: choice={chosen!r:.80}: expected the keys {', '.join(sorted(expected))}.")
        for name, key in expected.items():
            if not key.accepts(chosen[name]):
                raise UserError(
                    f"choice={path}: {name}={chosen[name]!r:.80}: expected {key.expected()}, as ag.choose wrote it."
                )
        return cls(**chosen)
