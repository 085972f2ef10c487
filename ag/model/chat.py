"""Chats: messages for templates, the tokens of the assistant, and the spans of the parts of a chat.

The place of a message in the rendered text is found without a search: the chat is rendered once more with the letters
of each message replaced by a symbol. The two renderings have to agree in all other letters. So words of a message are
never mistaken for words of the template or of another message.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, TemplateError

from ag.errors import UserError

Part = Literal["template", "system"]
Message = dict[str, Any]
Mask = npt.NDArray[np.bool_]
Offsets = npt.NDArray[np.int64]  # for each token, where its first letter stands and where its last letter ends, [T, 2]

VARIABLES = {"tools", "documents"}  # arguments of apply_chat_template that are variables of the template
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a message that a template may leave out
MARKED = re.compile(r"{%-?\s*generation\s*-?%}")
SYMBOL = 0x100000  # the first symbol: characters that Unicode leaves to private use
BLANK = r"[\s\"\\\x00-\x1f]"  # a blank, or what JSON escapes
UNKNOWN = (
    "so that it is not known which tokens carry loss: use a template with {% generation %} marks, a row for each "
    "answer with what comes before it as its prompt, or leave the row out"
)


@dataclass(frozen=True)
class Chat:
    """Messages, and the variables of their template.

    Attributes:
        messages: messages of :func:`for_template`.
        variables: variables of the chat template, for example ``tools`` or ``enable_thinking``.
        continued: True if the text ends within the last message, which an answer then continues.
    """

    messages: list[Message]
    variables: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False

    @classmethod
    def read(cls, path: str | Path) -> Chat:
        """Read a chat from a JSON file with a list of messages, or a row of training data: an object with ``messages``.

        Raises:
            UserError: it cannot be read, or holds something else.
        """
        text = ""
        try:
            text = Path(path).read_text(encoding="utf-8")
            options = json.loads(text)
            json.dumps(options, ensure_ascii=False).encode()  # half of a surrogate pair is no character
            row = {"messages": options} if isinstance(options, list) else options
            messages = [for_template(from_api(message)) for message in row["messages"]]
            if not messages or not all(isinstance(message.get("role"), str) for message in messages):
                raise ValueError("a message has no role, or there is none")
            return cls(messages, variables(row))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if rows := _rows(text):
                raise UserError(
                    f"{path}: these are JSON lines, {rows} rows; expected the JSON of one chat: write one row into a "
                    "file of its own."
                ) from error
            raise UserError(
                f"{path}: {error!r:.200}; expected JSON in UTF-8: a list of messages with role and content, or an "
                "object with messages and tools."
            ) from error

    def text(self, tokenizer: Any, opened: bool = True) -> str:
        """Return the text of the chat by a tokenizer's template, with the opening of an answer if ``opened``.

        Raises:
            UserError: without a template, for a variable with the name of an argument, or where the template refuses.
        """
        ends = {"continue_final_message": True} if self.continued else {"add_generation_prompt": opened}
        return str(self._apply(tokenizer, tokenize=False, **ends))

    def tokens(self, tokenizer: Any) -> tuple[list[int], Offsets, Mask | None]:
        """Return the tokens of the text, their offsets, and the template's marks of the assistant's tokens, or None."""
        marked = is_marked(tokenizer, self.variables.get("tools"))
        options: dict[str, Any] = {"return_dict": True, "return_assistant_tokens_mask": marked}
        out = self._apply(tokenizer, **options, tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False})
        marks = np.array(out["assistant_masks"], dtype=np.bool_) if marked else None
        return out["input_ids"], np.array(out["offset_mapping"]).reshape(-1, 2), marks

    def _apply(self, tokenizer: Any, **options: Any) -> Any:
        if tokenizer.chat_template is None:
            raise UserError(
                f"The tokenizer {tokenizer.name_or_path} has no chat template: give a text in place of a chat, or a "
                "model with a template, such as an instruct version."
            )
        own = inspect.signature(tokenizer.apply_chat_template).parameters
        if mismatch := sorted(self.variables.keys() & own.keys() - VARIABLES):
            raise UserError(f"{mismatch[0]}: expected a variable of the chat template, such as enable_thinking.")
        try:
            return tokenizer.apply_chat_template(self.messages, **options, **self.variables)
        except (TemplateError, TypeError, ValueError, NotImplementedError) as error:
            raise UserError(f"The chat template of the model refuses this: {error}.") from error
        except OverflowError as error:  # an older transformers looks for the token before the text
            raise UserError("The chat template of the model marks an empty {% generation %} at its start.") from error


def _rows(text: str) -> int:
    """Return the number of rows of JSON lines; 0 for any other text, one JSON value included."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        is_json_lines = all(isinstance(json.loads(line), dict | list) for line in lines)
    except (ValueError, RecursionError):
        return 0
    return len(lines) if is_json_lines and len(lines) > 1 else 0


def from_api(message: Mapping[str, Any]) -> Message:
    """Return a message of OpenAI's API as templates know it: parts of text are joined, and a developer is the system.

    vLLM joins the parts in the same way.
    """
    out, content = dict(message), message.get("content")
    if isinstance(content, list) and all(isinstance(x, dict) and x.get("type") == "text" for x in content):
        out["content"] = "\n".join(part["text"] for part in content)
    if out.get("role") == "developer":
        out["role"] = "system"
    return out


def for_template(message: Mapping[str, Any]) -> Message:
    """Return a message for chat templates: without None, and with arguments of tools as objects.

    In OpenAI's API and in tables these arguments may be JSON.
    """
    out = {name: value for name, value in message.items() if value is not None}
    if isinstance(out.get("tool_calls"), list):
        out["tool_calls"] = [_called(call) for call in out["tool_calls"]]
    return out


def _called(call: Any) -> Any:
    """Return a tool call whose arguments are an object, parsed if they are its JSON."""
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
    """Return the variables of the chat template in a row: ``tools``, as a list or its JSON, and others.

    Raises:
        UserError: they are something else.
    """
    tools = row.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
        return {"tools": tools or None, **(row.get("chat_template_kwargs") or {})}
    except (ValueError, TypeError) as error:
        raise UserError(f"tools is a list (or its JSON) and chat_template_kwargs an object: {error}.") from error


def reads(tokenizer: Any, name: str, tools: Any = None) -> bool:
    """Whether the chat template has a variable of this name."""
    tokens = Environment(autoescape=True).lexer.tokenize(str(tokenizer.get_chat_template(tools=tools)))
    return any(token.type == "name" and token.value == name for token in tokens)


def is_marked(tokenizer: Any, tools: Any = None) -> bool:
    """Whether the chat template marks the tokens of the assistant (``{% generation %}``)."""
    return MARKED.search(str(tokenizer.get_chat_template(tools=tools))) is not None


def spans(tokenizer: Any, chat: Chat, parts: Collection[str], opened: bool = True) -> list[tuple[int, int]]:
    """Return the spans of tokens of parts of a chat before an answer, for :meth:`ag.EvictionCache.protect`.

    Args:
        tokenizer: a fast tokenizer, which gives the offsets of tokens.
        chat: the chat, whose text is tokenised without further special tokens.
        parts: ``template``: the text around the messages, with tools and their calls; ``system``: system messages.
        opened: whether the text ends with the opening of the answer.

    Raises:
        UserError: for another part, a tokenizer that is not fast, or a template that changes a message.
    """
    for part in parts:
        if part not in get_args(Part):
            raise UserError(
                f"protect={part}: expected {' or '.join(get_args(Part))}, or a span of tokens such as 0-40."
            )
    if not tokenizer.is_fast:
        raise UserError(f"protect={next(iter(parts))}: {type(tokenizer).__name__} does not say where tokens are.")
    rendered = _Rendered(tokenizer, chat, opened, otherwise="protect spans of tokens such as 0-40")
    roles = [message["role"] for message in chat.messages]
    rendered.check([turn for turn, role in enumerate(roles) if "template" in parts or role in parts], ["content"])
    of_part = np.full(len(rendered.text), "template", dtype=object)
    for message_text, characters in zip(rendered.texts, rendered.text_characters, strict=True):
        if len(characters) and message_text.kind != "call":
            of_part[characters[0] : characters[-1] + 1] = roles[message_text.turn]
    offsets = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return runs(np.array([bool(set(of_part[slice(*offset)]) & set(parts)) for offset in offsets], dtype=np.bool_))


def assistant_tokens(tokenizer: Any, chat: Chat, turns: Collection[int]) -> tuple[list[int], Mask]:
    """Return the tokens of a chat, and a mask that is True where the assistant speaks in some turns.

    The mask follows the marks of the template where it has some. Otherwise a turn is the text between the opening of
    an answer and the next message. In both cases the tokens hold all words of these turns, and none of another message.

    Raises:
        UserError: the template refuses the chat, or changes or repeats the words of a turn.
    """
    rendered = _Rendered(tokenizer, chat, opened=False, otherwise=UNKNOWN)
    rendered.check(turns, ["content", "call"])
    for turn in turns:
        if not any(x.letters for x in rendered.texts if x.turn == turn and x.kind != "thought"):
            raise rendered.refused(turn, "has all that turn {} says among its own strings")
    ids, offsets, marks = chat.tokens(tokenizer)
    own = rendered.by_turns(turns, offsets) if marks is None else rendered.by_marks(turns, offsets, marks)
    rendered.check_tokens(turns, offsets, own)
    return ids, own


def runs(mask: Mask) -> list[tuple[int, int]]:
    """Return the first index of each run of True, and one past its last."""
    edges = np.flatnonzero(np.diff([0, *mask.astype(np.int8), 0])).reshape(-1, 2)
    return [(first, last) for first, last in edges.tolist()]


class MessageText(NamedTuple):
    """A text of a message."""

    turn: int
    letters: str  # the letters that a symbol replaces
    kind: Literal["content", "thought", "call"]


class _Rendered:
    """A chat rendered by its template (``text``), and with symbols for the words of messages (``cover``)."""

    def __init__(self, tokenizer: Any, chat: Chat, opened: bool, otherwise: str) -> None:
        self.tokenizer, self.chat, self.otherwise = tokenizer, chat, otherwise
        self.text = chat.text(tokenizer, opened)
        self.texts: list[MessageText] = []
        self.stays = _stays(str(tokenizer.get_chat_template(tools=chat.variables.get("tools"))))
        self.hidden = [self._hide(turn, message) for turn, message in enumerate(chat.messages)]
        self.cover = replace(chat, messages=self.hidden).text(tokenizer, opened)
        self.symbols = self._symbols(self.cover)
        turns = np.array([message_text.turn for message_text in self.texts] + [-1])  # -1 for letters of the template
        self.turn_of = turns[self.symbols]
        self.text_characters = [np.flatnonzero(self.symbols == symbol) for symbol in range(len(self.texts))]

    def _hide(self, turn: int, message: Message) -> Message:
        """Return a message with symbols for its letters."""

        def hide(value: Any, kind: Literal["content", "thought", "call"]) -> Any:
            if isinstance(value, dict):
                return {key: hide(inner, kind) for key, inner in value.items()}
            if isinstance(value, list):
                return [hide(inner, kind) for inner in value]
            if not isinstance(value, str):
                return value
            symbol, pieces = chr(SYMBOL + len(self.texts)), self.stays.split(value)
            self.texts.append(MessageText(turn, "".join(pieces[::2]), kind))
            pieces[::2] = [symbol * len(letters) for letters in pieces[::2]]
            return "".join(pieces)

        def hide_call(call: Any) -> Any:
            inner, num_texts = call.get("function", call) if isinstance(call, dict) else None, len(self.texts)
            if not isinstance(inner, dict):
                return call
            inner = inner | {"arguments": hide(inner.get("arguments"), "call")}
            if not any(x.letters for x in self.texts[num_texts:]):  # only the name shows the place of the call
                inner |= {"name": hide(inner.get("name"), "call")}
            return {**call, "function": inner} if "function" in call else inner

        out = message | {key: hide(message[key], "thought") for key in THOUGHTS if key in message}
        if isinstance(content := message.get("content"), list):
            out["content"] = [
                part | {"text": hide(part["text"], "content")} if isinstance(part, dict) and "text" in part else part
                for part in content
            ]
        elif content is not None:
            out["content"] = hide(content, "content")
        if calls := message.get("tool_calls"):
            out["tool_calls"] = [hide_call(call) for call in calls]
        return out

    def _symbols(self, text: str) -> npt.NDArray[np.int64]:
        """Return for each letter the index of the text that its symbol replaces, -1 for letters of the template."""
        symbols = _codes(text) - SYMBOL
        return np.where((symbols >= 0) & (symbols < len(self.texts)), symbols, -1)

    def check(self, turns: Collection[int], text_kinds: Collection[str]) -> None:
        """Refuse a template that changes the words of turns; it may leave out their beginning, as of thoughts."""
        shared_length = min(len(self.text), len(self.cover))
        equal = _codes(self.text)[:shared_length] == _codes(self.cover)[:shared_length]
        same = equal | (self.symbols[:shared_length] >= 0)
        if not same.all() or len(self.text) != len(self.cover):
            turns_before = self.turn_of[: shared_length if same.all() else int(same.argmin())]
            turn = int(turns_before[turns_before >= 0][-1]) if (turns_before >= 0).any() else 0
            raise self.refused(turn, "writes other words around turn {} when that turn says other words")
        for message_text, characters in zip(self.texts, self.text_characters, strict=True):
            written = "".join(self.text[at] for at in characters)
            is_unchanged = message_text.letters.endswith(written) if written else not message_text.letters
            if message_text.turn in turns and message_text.kind in text_kinds and not is_unchanged:
                raise self.refused(message_text.turn, "changes what turn {} says")

    def by_marks(self, turns: Collection[int], offsets: Offsets, marks: Mask) -> Mask:
        """Return the template's marks of some turns."""
        own = marks.copy()
        for first, end in runs(marks):
            inside = self.turn_of[offsets[first, 0] : offsets[end - 1, 1]]
            turns_before = self.turn_of[: offsets[first, 0]]
            of = set(inside[inside >= 0]) or set(turns_before[turns_before >= 0][-1:])
            own[first:end] = bool(of & set(turns))
        return own

    def by_turns(self, turns: Collection[int], offsets: Offsets) -> Mask:
        """Return the tokens of the words of some turns, and the tokens that close each turn."""
        starts, ends = offsets.T
        own = np.zeros(len(offsets), dtype=np.bool_)
        for turn in turns:
            letters = np.flatnonzero(self.turn_of == turn)
            begin, text_end = self._begin(turn, int(letters[0])), int(letters[-1]) + 1
            end = text_end + _common(self._behind(turn, text_end, turn + 1, opened=False), self.cover[text_end:])
            own |= (ends > begin) & ((starts < text_end) | (ends <= end))
        return own

    def _begin(self, turn: int, first: int) -> int:
        """Return the index after the opening of a turn."""
        if not turn:
            return first
        text_positions = np.flatnonzero(self.symbols[:first] >= 0)
        start = int(text_positions[-1]) + 1 if len(text_positions) else 0
        # a template may open an answer with more than the rendered turn has there, for example a tag of thoughts
        opening = self._behind(turn, start, turn, opened=True)
        common = _common(opening, self.cover[start:])
        if common < len(opening) and common <= _common(opening, self._behind(turn, start, turn, opened=False)):
            raise self.refused(turn, "begins turn {} otherwise than it opens an answer")
        return start + common

    def _behind(self, turn: int, at: int, messages: int, opened: bool) -> str:
        """Return the text that follows the letter before ``at`` in a rendering of the first messages alone."""
        part = replace(self.chat, messages=self.hidden[:messages]).text(self.tokenizer, opened)
        text_positions = np.flatnonzero(self._symbols(part) >= 0)
        end = int(text_positions[-1]) + 1 if len(text_positions) else 0
        if part[end - 1 : end] != self.cover[at - 1 : at]:
            raise self.refused(turn, "changes what comes before turn {} when others follow")
        return part[end:]

    def check_tokens(self, turns: Collection[int], offsets: Offsets, own: Mask) -> None:
        """Refuse a mask that lacks words of the turns, or has words of other messages."""

        def covered_characters(tokens: Mask) -> Mask:
            steps = np.zeros(len(self.text) + 1, dtype=np.int64)
            np.add.at(steps, offsets[tokens, 0], 1)
            np.add.at(steps, offsets[tokens, 1], -1)
            return np.cumsum(steps)[:-1] > 0

        taught = np.isin(self.turn_of, list(turns))
        needed = np.array([message_text.kind != "thought" for message_text in self.texts] + [False])[self.symbols]
        if (mismatch := covered_characters(own) & (self.turn_of >= 0) & ~taught).any():
            raise self.refused(int(self.turn_of[mismatch][0]), "would put loss on what turn {} says")
        if (mismatch := covered_characters(~own) & needed & taught).any():
            raise self.refused(int(self.turn_of[mismatch][0]), "leaves some of what turn {} says without loss")

    def refused(self, turn: int, problem: str) -> UserError:
        """Return the error for a turn of a template."""
        return UserError(f"the chat template {problem.format(turn + 1)}, {self.otherwise}")


def _codes(text: str) -> npt.NDArray[np.int64]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.int64)


def _common(first: str, second: str) -> int:
    """Return the length of the common beginning of two texts."""
    return len(commonprefix([first, second]))


@lru_cache(maxsize=8)
def _stays(template: str) -> re.Pattern[str]:
    """Return a pattern of the letters that no symbol replaces.

    These are blanks, which templates strip, characters that JSON escapes, and strings that the template may search for
    (``</think>``).
    """
    strings = {
        token.value.strip()
        for token in Environment(autoescape=True).lexer.tokenize(template)
        if token.type == "string" and re.search(r"[^\w\s]", token.value)
    }
    pieces = [re.escape(one) for one in sorted(strings, key=len, reverse=True) if one]
    return re.compile(f"({'|'.join([*pieces, BLANK])})")
