"""Chats as their template takes them, and where the parts of one lie among the tokens of its text."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

from jinja2 import TemplateError

from ag.errors import UserError

Part = Literal["template", "system"]
Message = dict[str, Any]

THOUGHT = "</think>"  # ends what many templates leave out of earlier turns
VARIABLES = {"tools", "documents"}  # of a template, among the arguments of apply_chat_template
#: What a template raises at what it cannot write.
REFUSALS = (TemplateError, TypeError, ValueError, NotImplementedError)


def for_template(message: Mapping[str, Any]) -> Message:
    """Return a message as chat templates take it: what is None is left out, and arguments of tools are objects.

    OpenAI's API has these arguments as JSON, and tables hold them so where tools differ in theirs.
    """
    out = {name: value for name, value in message.items() if value is not None}
    if isinstance(out.get("tool_calls"), list):
        out["tool_calls"] = [_called(call) for call in out["tool_calls"]]
    return out


def _called(call: Any) -> Any:
    """Return a tool call whose arguments are an object, where they are the JSON of one."""
    try:
        inner = call.get("function", call)
        arguments = json.loads(inner["arguments"])
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if "function" in call else inner


def variables(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row says to its template beside the messages: ``tools``, as a list or its JSON, and others.

    Raises:
        ValueError, TypeError: they are something else.
    """
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    return {"tools": tools or None, **(row.get("chat_template_kwargs") or {})}


@dataclass(frozen=True)
class Chat:
    """A chat that the assistant is to answer.

    Attributes:
        messages: as :func:`for_template` returns them.
        variables: of the chat template, such as ``tools`` or ``enable_thinking``.
    """

    messages: list[Message]
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> Chat:
        """Read a chat from a JSON file.

        Args:
            path: of the file, with a list of messages, or an object that a row of training data might be: ``messages``,
                ``tools``, ``chat_template_kwargs``.

        Raises:
            UserError: it cannot be read, or holds something else.
        """
        try:
            told = json.loads(Path(path).read_text(encoding="utf-8"))
            json.dumps(told, ensure_ascii=False).encode()  # half of a surrogate pair is no character
            row = {"messages": told} if isinstance(told, list) else told
            messages = [for_template(message) for message in row["messages"]]
            if not messages or not all(isinstance(message.get("role"), str) for message in messages):
                raise ValueError("a message has no role, or there is none")
            return cls(messages, variables(row))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path}: {error!r:.200}; expected JSON in UTF-8: a list of messages with role and content, or an "
                "object with messages and tools."
            ) from error

    def text(self, tokenizer: Any) -> str:
        """Return what a tokenizer's chat template makes of it, up to where the assistant answers.

        Raises:
            UserError: without a template, for a variable that is none of a template's, or where the template refuses.
        """
        if tokenizer.chat_template is None:
            raise UserError(
                f"The tokenizer {tokenizer.name_or_path} has no chat template: give a text in place of a chat, or a "
                "model with a template, such as an instruct version."
            )
        own = inspect.signature(tokenizer.apply_chat_template).parameters
        if wrong := sorted(self.variables.keys() & own.keys() - VARIABLES):
            raise UserError(f"{wrong[0]}: expected a variable of the chat template, such as enable_thinking.")
        told = {"tokenize": False, "add_generation_prompt": True, **self.variables}
        try:
            return str(tokenizer.apply_chat_template(self.messages, **told))
        except REFUSALS as error:
            raise UserError(f"The chat template of the model refuses this: {error}.") from error


def spans(
    tokenizer: Any, text: str, messages: Sequence[Mapping[str, Any]], parts: Collection[str]
) -> list[tuple[int, int]]:
    """Return the tokens of parts of a chat, as :meth:`ag.EvictionCache.protect` takes them.

    Args:
        tokenizer: a fast tokenizer, which knows where in a text its tokens are.
        text: what its chat template makes of the messages, as it is tokenized (without special tokens beside it).
        messages: with ``role`` each, and ``content``, ``reasoning_content`` or ``tool_calls``.
        parts: ``template``: what the template adds to what is said, with the tools and their calls; ``system``: what
            system messages say.

    Raises:
        UserError: for a part of another name, a tokenizer that is not fast, or a template that changes a message.
    """
    for part in parts:
        if part not in get_args(Part):
            raise UserError(
                f"protect={part}: expected {' or '.join(get_args(Part))}, or a span of tokens such as 0-40."
            )
    if not tokenizer.is_fast:
        raise UserError(f"protect={next(iter(parts))}: {type(tokenizer).__name__} does not say where its tokens are.")
    of_part, at = ["template"] * len(text), 0
    for message in messages:
        role = message["role"]
        for said in _said(message, text, at):
            begin = text.find(said, at)
            if begin >= 0:
                at = begin + len(said)
                of_part[begin:at] = [role] * len(said)
            elif "template" in parts or role in parts:
                raise UserError(
                    f"protect={next(iter(parts))}: the chat template changes a {role} message, so that it is not known "
                    "where it lies; protect spans of tokens such as 0-40."
                )
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    chosen = [any(of_part[place] in parts for place in range(*offset)) for offset in offsets]
    runs = [[*run] for inside, run in groupby(range(len(chosen)), chosen.__getitem__) if inside]
    return [(run[0], run[-1] + 1) for run in runs]


def _said(message: Mapping[str, Any], text: str, at: int) -> list[str]:
    """Return what a message says, in its order in a text from ``at`` on; thoughts that the text lacks are left out."""
    content, thought = (str(message.get(name) or "").strip() for name in ("content", "reasoning_content"))
    if content not in text[at:]:
        content = content.rpartition(THOUGHT)[2].strip()
    return [thought, content] if thought and thought in text[at:] else [content]
