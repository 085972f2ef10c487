"""Serve OpenAI's API: ``python -m ag.serve model=smollm2 policy=gates:smollm2 budget=0.3 memory=2GiB``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ag.commands.shared import SharedPolicy
from ag.config.command_line import main_from_schema
from ag.config.sections import key
from ag.errors import UserError, need
from ag.hardware import main_memory

KEY_VARIABLE = "AG_API_KEY"
MODULES = ("fastapi", "openai", "prometheus_client", "uvicorn")  # of other packages, which the server imports
UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass
class ServeConfig(SharedPolicy):
    """The keys of ``python -m ag.serve``."""

    config: str | None = key(None, "YAML file of these keys; the keys of the command line win")
    memory: str = key(
        "1GiB",
        "memory for the keys and values of all requests, allocated at the start",
        words="bytes, MiB, GiB, MB, GB",
    )
    host: str = key("127.0.0.1", "address to listen at; 0.0.0.0 means every address of the machine")
    port: int = key(8000, "port to listen at; 0 means a free one", ge=0, le=65535)
    api_key: str | None = key(
        None, f"key that clients must send; if others can see this line, set the variable {KEY_VARIABLE} instead"
    )
    served_name: str | None = key(None, "name of the model for clients; null means the last part of its name")
    protect: list[Literal["system", "template"]] = key(
        [],
        "parts of chats that are never evicted: system (text of system messages), template (what the chat template "
        "adds)",
    )
    prefill_tokens: int = key(1024, "prompt tokens that are read between two tokens of running answers", ge=1)
    batch: int = key(64, "largest number of requests answered at once", ge=1)
    queue: int = key(256, "largest number of waiting requests", ge=1)
    prompt_lookup: int = key(
        0, "draft tokens per step, divided among all answers and looked up in their own text; 0 means none", ge=0
    )
    origins: list[str] = key(
        [], "pages that may use the server from a browser (CORS), such as https://chat.example; * means all"
    )
    body_bytes: int = key(2**20, "longest body of a request", ge=1)
    answer_tokens: int | None = key(
        None, "longest answer in tokens; null means the room that is left in the model's context", ge=1
    )
    wait_seconds: float = key(60.0, "longest time that a request waits before its prompt is read", ge=0)
    answer_seconds: float = key(600.0, "longest time from a request to the end of its answer, which is then cut", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_bytes < 1:
            raise ValueError(f"memory={self.memory}: expected bytes, such as 2GiB")

    @property
    def name(self) -> str | None:
        """Name of the model for clients; None means the name in the export of the gates."""
        return self.served_name or (Path(self.model).name if self.model else None)

    @property
    def memory_bytes(self) -> int:
        """``memory`` in bytes; 0 for a text that is no size."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", self.memory.strip().lower())
        return int(float(match[1]) * UNITS.get(match[2], 0)) if match else 0

    def check(self) -> None:
        """Refuse missing packages, a policy that cannot be used, and more memory than this machine has."""
        for module in MODULES:
            need(module, "serve", "ag.serve")
        self.spec()
        if self.device == "cpu":
            self.check_memory(main_memory(), "this machine")

    def check_memory(self, nbytes: int, machine: str) -> None:
        """Refuse ``memory`` that is more than the bytes of a machine or a GPU."""
        if self.memory_bytes > nbytes:
            unit = re.sub(r"[\d.\s]", "", self.memory)
            has = f"{nbytes / UNITS[unit.lower()]:,.1f}{unit}" if unit else f"{nbytes:,} bytes"
            raise UserError(
                f"memory={self.memory}: {machine} has {has} in all: expected less, as the weights of the model need "
                "some too."
            )


main = main_from_schema("ag.serve", ServeConfig, "ag.serve.server:run", check=ServeConfig.check)
