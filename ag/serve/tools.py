"""Tool calls: formats of chat templates, grammars that force calls, and a parser of completions."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

ENDS = "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>"  # possible end tokens
THOUGHT = "</think>"  # ends thoughts
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolCallFormat:
    """The format in which a chat template writes tool calls."""

    response: Mapping[str, Any]  # response template of transformers, for text with special tokens
    call: str | None = None  # text of a call, with ``NAME`` and ``ARGUMENTS``; None: calls cannot be forced
    end: str = "(?!)"  # pattern of the text that ends a completion and is not part of it

    def grammar(
        self, tools: Sequence[Any], content_schema: str | None, special: Mapping[str, int], thinks: bool = False
    ) -> str:
        """Return the text of a grammar for one call.

        Args:
            tools: tools that may be called, with a name and the JSON schema of their parameters.
            content_schema: JSON schema of completions without a call. None: a call is required.
            special: ids of special tokens, by text.
            thinks: True if the prompt has opened thoughts, which then come first.
        """
        rules = [] if content_schema is None else [f"other: %json {content_schema}"]
        for index, tool in enumerate(tools):
            name = json.dumps(tool.function.name, ensure_ascii=False)[1:-1]
            before, after = (self._rule(x.replace("NAME", name), special) for x in str(self.call).split("ARGUMENTS"))
            schema = json.dumps(tool.function.parameters or _NO_PARAMETERS)
            rules.append(f"call{index}: {before} %json {schema} {after}")
        start = " | ".join(rule.partition(":")[0] for rule in rules)
        if thinks:
            start, thoughts_rule = rf"thoughts /\s*/ ({start})", f"thoughts: /(?s:.*)/ <[{special.get(THOUGHT)}]>"
            rules.append(thoughts_rule if THOUGHT in special else f'thoughts[suffix="{THOUGHT}"]: /(?s:.*)/')
        return "\n".join([f"start: {start}", *rules])

    @staticmethod
    def _rule(text: str, special: Mapping[str, int]) -> str:
        """Return a text as a grammar rule, in which special tokens are tokens."""
        parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
        return " ".join(f"<[{special[x]}]>" if x in special else json.dumps(x, ensure_ascii=False) for x in parts if x)


#: How families of chat templates write calls, by a pattern of the template; the first match applies: a call, its name
#: and its arguments, and its region for transformers' parser, in which ``END`` ends a completion.
FAMILIES: Mapping[str, tuple[str, Mapping[str, str], Mapping[str, Any]]] = {
    # Hermes, Qwen 2.5 and 3, and others since
    r'<tool_call>[^<]{0,80}?"name': (
        '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
        {"name": "{content.name}", "arguments": "{content.arguments}"},
        {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True},
    ),
    # Mistral since version 11, then earlier versions
    r"\[ARGS\]": (
        "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
        {"name": "{name}", "arguments": "{content}"},
        {
            "open_pattern": r"\s*\[TOOL_CALLS\](?P<name>[^\[\{]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])|END",
            "repeats": True,
        },
    ),
    r"\[TOOL_CALLS\]": (
        '[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS}]',
        {"name": "{name}", "arguments": "{arguments}"},
        {"open_pattern": r"\s*\[TOOL_CALLS\]", "close_pattern": "END", "transform_each": True},
    ),
    # Llama 3.1 to 3.3: the whole completion is a call
    r"""'"parameters": '""": (
        '{"name": "NAME", "parameters": ARGUMENTS}',
        {"name": "{content.name}", "arguments": "{content.parameters}"},
        {"open_pattern": r'\A\s*(?:<\|python_tag\|>)?(?=\s*\{\s*"name"\s*:)', "close_pattern": "END"},
    ),
}


def tool_call_format(tokenizer: Any, with_grammar: bool = False) -> ToolCallFormat | None:
    """Return the format in which a tokenizer's chat template writes calls. None: it is unknown.

    The tokenizer's own response template takes precedence over its family's template.

    Args:
        tokenizer: a tokenizer of transformers.
        with_grammar: True if completions follow a grammar: then the text of an end token is part of the completion.
    """
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    ends = [re.escape(text) for text in ENDS if text in special and not with_grammar]
    end = rf"\s*(?:{'|'.join(ends) or '(?!)'})"
    own = getattr(tokenizer, "response_template", None)
    family = next((family for pattern, family in FAMILIES.items() if re.search(pattern, template)), None)
    if family is None:
        return None if own is None else ToolCallFormat(own, end=end)
    call, function, region = family
    calls = {"content": "json", "transform": {"type": "function", "function": function}}
    calls |= {key: value.replace("END", end) if isinstance(value, str) else value for key, value in region.items()}
    thoughts = {"open": "<think>", "close": THOUGHT}
    fields = {"reasoning_content": thoughts, "tool_calls": calls, "content": {"close_pattern": end}}
    # some templates open the thoughts after the beginning of the assistant's turn
    anchor = r"\A(?:.*<\|im_start\|>assistant\n|.*)" if "<tool_call>" in call else r"\A.*"
    return ToolCallFormat(own or {"start_anchor_pattern": anchor, "fields": fields}, call, end)


class OutputParser:
    """Splits a completion into content, thoughts and calls while it is generated.

    ``prompt`` is the text of the prompt with special tokens. Without ``parallel`` only the first call is kept.
    """

    def __init__(self, calls: ToolCallFormat, prompt: str, tools: Sequence[Any], parallel: bool) -> None:
        # Private fields of transformers' parser, which shows no state in public: `_buffer` is its text, of which it has
        # read `_pos` characters, and `_body` is the text so far of its open region, which is named `_current`.
        self._parser = ResponseParser(dict(calls.response), prefix=prompt, tools=[*tools])
        # characters of the parser's text that were emitted, or belong to no part
        self._num_emitted = len(self._parser._buffer)
        self._end, self._parallel = calls.end, parallel
        self.thinks = self._parser._current == "reasoning_content"  # True if the prompt has opened thoughts
        self.count = 0  # number of calls so far

    def add(self, text: str, last: bool = False) -> dict[str, Any]:
        """Return the new parts of an OpenAI message after more text; ``last`` ends the completion.

        An invalid call and all text after it become content.
        """
        parts: dict[str, Any] = {}
        # letter by letter: the parts do not depend on how the text was cut, and an error keeps earlier parts
        for letter in [*text, None] if last else text:
            parser, region_start = self._parser, self._parser._pos - len(self._parser._body)
            try:
                self._read(letter, parts)
            except (ValueError, KeyError) as error:  # for example a call that is not JSON
                body = parser._buffer[region_start : parser._pos]
                if letter is not None and _ends_in_string(error) and body != parser._body:
                    parser._body = body  # the text that ends a call was part of a string in it: the call goes on
                    continue
                unparsed = parser._buffer[self._num_emitted :]
                no_calls = {"start_anchor_pattern": r"\A", "fields": {"content": {"close_pattern": self._end}}}
                self._parser, self._num_emitted = ResponseParser(no_calls, prefix=""), 0
                for text_part in [unparsed] if letter is not None else [unparsed, None]:
                    self._read(text_part, parts)
        return parts

    def _read(self, text: str | None, parts: dict[str, Any]) -> None:
        """Add the new parts of a text to ``parts``; None ends the text."""
        parser = self._parser
        for event in parser.finalize()[1] if text is None else parser.feed(text):
            field = event["field"]
            if event["type"] == "region_close" and field == "tool_calls":
                values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                if not all(isinstance(value["function"]["name"], str) for value in values):
                    raise ValueError("the name of a call is no text")
                calls = [call for call in map(self._call, values) if self._parallel or call["index"] < 1]
                if calls:
                    parts.setdefault(field, []).extend(calls)
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
            "id": uuid.uuid4().hex[:9],  # Mistral's templates accept only 9 letters and digits
            "type": "function",
            "function": {"name": function["name"], "arguments": text},
        }


def _ends_in_string(error: Exception) -> bool:
    """Return whether a text was no JSON because it ended in a string."""
    cause = error.__cause__
    return isinstance(cause, json.JSONDecodeError) and cause.msg.startswith("Unterminated string")
