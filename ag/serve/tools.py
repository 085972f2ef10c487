"""Calls of tools: how chat templates write them, grammars that force them, and the division of answers."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

ENDS = "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>"  # they end answers
THOUGHT = "</think>"  # ends thoughts
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolCallFormat:
    """How a chat template writes calls."""

    response: Mapping[str, Any]  # template of transformers that divides an answer, its special tokens included
    before_arguments: str | None = (
        None  # text of a call up to its arguments, with ``NAME``; None: no call can be forced
    )
    after_arguments: str = ""  # text of a call after its arguments
    end: str = "(?!)"  # pattern of what ends an answer, and is no part of it

    def grammar(
        self, tools: Sequence[Any], content_schema: str | None, special: Mapping[str, int], thinks: bool = False
    ) -> str:
        """Return the text of a grammar for one call.

        Args:
            tools: the tools that may be called, with a name and the JSON schema of their parameters.
            content_schema: a JSON schema of answers without a call; None means that a call is required.
            special: ids of special tokens by their texts.
            thinks: whether thoughts come first, which the prompt has opened.
        """
        rules = [] if content_schema is None else [f"other: %json {content_schema}"]
        for index, tool in enumerate(tools):
            name = json.dumps(tool.function.name, ensure_ascii=False)[1:-1]
            before_arguments, after_arguments = (
                self._rule(text.replace("NAME", name), special)
                for text in (self.before_arguments or "", self.after_arguments)
            )
            schema = json.dumps(tool.function.parameters or _NO_PARAMETERS)
            rules += [
                f"call{index}: {before_arguments} arguments{index} {after_arguments}",
                f"arguments{index}: %json {schema}",
            ]
        alternatives = [rule.partition(":")[0] for rule in rules if not rule.startswith("arguments")]
        start = " | ".join(alternatives)
        if thinks:
            start, thoughts_rule = rf"thoughts /\s*/ ({start})", f"thoughts: /(?s:.*)/ <[{special.get(THOUGHT)}]>"
            rules.append(thoughts_rule if THOUGHT in special else f'thoughts[suffix="{THOUGHT}"]: /(?s:.*)/')
        return "\n".join([f"start: {start}", *rules])

    @staticmethod
    def _rule(text: str, special: Mapping[str, int]) -> str:
        """Return a text as a rule of a grammar, with its special tokens as tokens."""
        parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
        return " ".join(f"<[{special[x]}]>" if x in special else json.dumps(x, ensure_ascii=False) for x in parts if x)


def _call_format(
    end: str,
    before_arguments: str,
    after_arguments: str,
    function: Mapping[str, str],
    anchor: str = r"\A.*",
    **calls: Any,
) -> ToolCallFormat:
    """Return how calls are written whose name and arguments are those of a function, in the regions ``calls``."""
    fields = {
        "reasoning_content": {"open": "<think>", "close": THOUGHT},
        "tool_calls": {"content": "json", "transform": {"type": "function", "function": function}} | calls,
        "content": {"close_pattern": end},
    }
    return ToolCallFormat({"start_anchor_pattern": anchor, "fields": fields}, before_arguments, after_arguments, end)


def _families(end: str) -> dict[str, ToolCallFormat]:
    """Return families of chat templates, by a pattern of their text; the first that is found holds."""
    return {
        # Hermes, Qwen 2.5 and 3, and others since
        r'<tool_call>[^<]{0,80}?"name': _call_format(
            end,
            '<tool_call>\n{"name": "NAME", "arguments": ',
            "}\n</tool_call>",
            {"name": "{content.name}", "arguments": "{content.arguments}"},
            r"\A(?:.*<\|im_start\|>assistant\n|.*)",  # behind it some templates open the thoughts
            open_pattern=r"\s*<tool_call>",
            close="</tool_call>",
            repeats=True,
        ),
        # Mistral since its version 11, then those before
        r"\[ARGS\]": _call_format(
            end,
            "[TOOL_CALLS]NAME[ARGS]",
            "",
            {"name": "{name}", "arguments": "{content}"},
            open_pattern=r"\s*\[TOOL_CALLS\](?P<name>[^\[\{]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]",
            close_pattern=rf"(?=\[TOOL_CALLS\])|{end}",
            repeats=True,
        ),
        r"\[TOOL_CALLS\]": _call_format(
            end,
            '[TOOL_CALLS][{"name": "NAME", "arguments": ',
            "}]",
            {"name": "{name}", "arguments": "{arguments}"},
            open_pattern=r"\s*\[TOOL_CALLS\]",
            close_pattern=end,
            transform_each=True,
        ),
        # Llama 3.1 to 3.3: the whole answer is a call
        r"""'"parameters": '""": _call_format(
            end,
            '{"name": "NAME", "parameters": ',
            "}",
            {"name": "{content.name}", "arguments": "{content.parameters}"},
            open_pattern=r'\A\s*(?:<\|python_tag\|>)?(?=\s*\{\s*"name"\s*:)',
            close_pattern=end,
        ),
    }


def tool_call_format(tokenizer: Any, ruled: bool = False) -> ToolCallFormat | None:
    """Return how the chat template of a tokenizer writes calls; None means that neither it nor its family says so.

    The tokenizer's own response template comes before that of the family.

    Args:
        tokenizer: of transformers.
        ruled: whether the answers follow a grammar, where the text of an end token is a part of the answer.
    """
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    ends = [re.escape(text) for text in ENDS if text in special and not ruled]
    end = rf"\s*(?:{'|'.join(ends) or '(?!)'})"
    family = next((calls for pattern, calls in _families(end).items() if re.search(pattern, template)), None)
    own = getattr(tokenizer, "response_template", None)
    if own is None:
        return family
    return ToolCallFormat(own, end=end) if family is None else replace(family, response=own)


class OutputParser:
    """Divides an answer into its content, its thoughts and its calls, while it is written.

    Args:
        calls: how the chat template writes calls.
        prompt: text of the prompt, special tokens included.
        tools: the tools, as in OpenAI's API.
        parallel: False leaves out all calls but the first.
    """

    def __init__(self, calls: ToolCallFormat, prompt: str, tools: Sequence[Any], parallel: bool) -> None:
        self._parser = ResponseParser(dict(calls.response), prefix=prompt, tools=[*tools])
        self._num_emitted = len(
            self._parser._buffer
        )  # characters of the parser's text that parts have, or that are none
        self._end, self._parallel = calls.end, parallel
        #: Whether the prompt has opened thoughts, in which the answer begins.
        self.thinks = self._parser._current == "reasoning_content"
        #: Calls so far.
        self.count = 0

    def add(self, text: str, last: bool = False) -> dict[str, Any]:
        """Return the new parts of a message of OpenAI's API that a text adds; ``last`` ends the answer.

        What is no valid call becomes content, with what follows it.
        """
        parts: dict[str, Any] = {}
        # by letters, so that an answer is divided alike in all pieces, and an error leaves what came before it
        for letter in [*text, None] if last else text:
            try:
                self._read(letter, parts)
            except (ValueError, KeyError):  # such as calls that are no JSON
                unparsed = self._parser._buffer[self._num_emitted :]
                no_calls = {"start_anchor_pattern": r"\A", "fields": {"content": {"close_pattern": self._end}}}
                self._parser, self._num_emitted = ResponseParser(no_calls, prefix=""), 0
                for text_part in [unparsed] if letter is not None else [unparsed, None]:
                    self._read(text_part, parts)
        return parts

    def _read(self, text: str | None, parts: dict[str, Any]) -> None:
        """Add to the parts what a text adds, or the end."""
        parser = self._parser
        for event in parser.finalize()[1] if text is None else parser.feed(text):
            field = event["field"]
            if event["type"] == "region_close" and field == "tool_calls":
                calls = [*map(self._call, event["value"] if isinstance(event["value"], list) else [event["value"]])]
                parts.setdefault(field, []).extend(calls if self._parallel else [x for x in calls if x["index"] < 1])
            elif event["type"] == "region_chunk" and not event["dirty"]:
                parts[field] = parts.get(field, "") + event["text"]
                self._num_emitted += len(event["text"])
        if parser._current != "tool_calls":
            self._num_emitted = max(self._num_emitted, parser._pos)

    def _call(self, value: Mapping[str, Any]) -> dict[str, Any]:
        function, arguments = value["function"], value["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.count += 1
        return {
            "index": self.count - 1,
            "id": uuid.uuid4().hex[:9],  # Mistral's templates take no others
            "type": "function",
            "function": {"name": function["name"], "arguments": text},
        }
