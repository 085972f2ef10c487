"""Continue a text, or answer a chat, under a policy: ``python -m ag.generate policy=h2o budget=0.25 prompt=TEXT``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ag.commands.shared import SharedPolicy
from ag.config.command_line import main_from_schema
from ag.config.sections import key, mapping
from ag.errors import UserError

if TYPE_CHECKING:
    from ag.model.chat import Chat


@dataclass
class GenerateConfig(SharedPolicy):
    """The keys of ``python -m ag.generate``."""

    prompt: str | None = key(None, "the text to continue")
    file: str | None = key(None, "file with the text to continue, instead of prompt", holds="file")
    chat: bool = key(False, "put the text into the tokenizer's chat template, as a user's message")
    messages: str | None = key(
        None,
        "JSON file with a chat to answer, instead of prompt: messages, or an object with messages and tools",
        holds="file",
    )
    template: dict[str, Any] = mapping("variables of the chat template, as template.enable_thinking=false")
    protect: list[str] = key(
        [],
        "prompt tokens that are never evicted: spans such as 0-40; in a chat template (what the template adds) and "
        "system",
    )
    max_new_tokens: int = key(64, "longest continuation in tokens", ge=1)
    temperature: float = key(0.0, "0: always the likeliest token; above 0: sample at this temperature", ge=0)
    top_p: float = key(1.0, "sample from the likeliest tokens that together have this probability", ge=0, le=1)
    seed: int = key(0, "seed of the samples", ge=0, le=2**32 - 1)
    compare: bool = key(False, "also continue with a full cache")
    layers: bool = key(False, "also print the tokens and bytes of each layer")

    def check(self) -> None:
        """Refuse a policy, a prompt and spans that cannot be used."""
        self.spec()
        _ = self.prompt_or_chat
        self.spans()

    @cached_property  # a file may be a pipe, which can be read once
    def prompt_or_chat(self) -> str | Chat:
        """The text to continue, or the chat to answer.

        Raises:
            UserError: none is given, or more than one, or its file cannot be read.
        """
        from ag.model.chat import Chat

        if sum(source is not None for source in (self.prompt, self.file, self.messages)) != 1:
            raise UserError(
                "Expected one text to continue: give either prompt=TEXT or file=PATH, or a chat with "
                "messages=FILE.json."
            )
        if self.messages is not None:
            if self.chat:
                raise UserError("chat=true and messages=FILE both make a chat: leave chat out.")
            chat = Chat.read(self.messages)
            return replace(chat, variables={**chat.variables, **self.template})
        text = self.prompt
        if text is None:
            try:
                text = Path(str(self.file)).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"file={self.file}: {error}; expected a text file in UTF-8.") from error
        if re.search(r"[\ud800-\udfff]", text):  # bytes of the command line that are no UTF-8
            raise UserError(f"prompt={text!r:.80}: expected a text in UTF-8.")
        if self.chat:
            return Chat([{"role": "user", "content": text}], self.template)
        if self.template:
            raise UserError(f"template.{next(iter(self.template))}: expected chat=true, or messages=FILE.json.")
        return text

    def spans(self) -> list[tuple[int, int]]:
        """Return the spans of tokens in ``protect``."""
        from ag.model.chat import Part

        token_spans = []
        for word in self.protect:
            if ends := re.fullmatch(r"(\d+)-(\d+)", word):
                token_spans.append((int(ends[1]), int(ends[2])))
            elif word not in get_args(Part) or not (self.chat or self.messages):
                raise UserError(f"protect={word}: expected spans such as 0-40, or template or system of a chat.")
        return token_spans


main = main_from_schema("ag.generate", GenerateConfig, "ag.continuation:run", check=GenerateConfig.check)
