"""Chats as rows of tokens: rendered by the tokenizer's template, with the loss on turns of the assistant.

Where the template marks what the assistant says (``{% generation %}``), the marks say which tokens carry loss. Else a
turn of the assistant is what the template writes between opening the turn and closing it, which is found by rendering
the chat up to each turn, with and without it. A turn that the template writes otherwise when others follow, such as one
whose thoughts are left out then, lies between the same opening and closing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ag.data.collate import Row
from ag.data.encode import divided
from ag.data.sources import DataError
from ag.model.chat import REFUSALS, Message, for_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKED = re.compile(r"{%-?\s*generation\s*-?%}")
#: What ShareGPT's ``from`` says, and what templates call it; other names stay.
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}


def is_marked(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template says itself which tokens are the assistant's."""
    return tokenizer.chat_template is not None and MARKED.search(str(tokenizer.get_chat_template())) is not None


def encode(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Any],
    place: str,
    *,
    given: int = 0,
    end: list[int],
    options: Mapping[str, Any],
) -> Row:
    """Tokenise a chat, with the assistant's turns marked as what carries loss.

    Args:
        tokenizer: renders the chat.
        messages: objects with ``role``, and ``content`` or ``tool_calls``; or with ``from`` and ``value`` (ShareGPT).
        place: file and row, for messages.
        given: so many messages are the prompt, in which no turn carries loss.
        end: tokens behind the chat, which carry loss.
        options: more arguments of the template, such as ``tools``.

    Raises:
        DataError: no chat template, no turn to learn from, or a chat that does not go through the template.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"{place} has messages, and the tokenizer {tokenizer.name_or_path} has no chat template: use a model with "
            "one, such as its instruct version, or rows with a prompt and a response"
        )
    chat = [_message(message, place) for message in messages]
    answers = [message for message in chat[given:] if message["role"] == "assistant"]
    if not answers:
        raise DataError(f"{place} has no message with role=assistant: nothing would carry loss; leave the row out")
    if not all(message.get("content") or message.get("tool_calls") for message in answers):
        raise DataError(f"{place} has an empty turn of the assistant: leave the row out, or write a response")
    try:
        ids, loss = (_by_marks if is_marked(tokenizer) else _by_prefixes)(tokenizer, chat, given, place, options)
    except DataError:
        raise
    except REFUSALS as error:
        raise DataError(f"{place} does not go through the tokenizer's chat template: {error}") from error
    if not loss.any():
        raise DataError(
            f"{place}: the chat template marks no token of the assistant's turns; check its generation marks"
        )
    tokens = np.array([*ids, *end], dtype=np.int32)
    return Row(tokens, int(loss.argmax()), loss=np.append(loss, np.ones(len(end), dtype=np.bool_)))


def _message(message: Any, place: str) -> Message:
    """Return a message with the keys and roles of chat templates, without what a table filled in (None)."""
    message = without_filled(message)
    if isinstance(message, dict) and "role" not in message and isinstance(message.get("from"), str):
        named = {"role": ROLES.get(message["from"], message["from"]), "content": message.get("value")}
        message = named | {key: value for key, value in message.items() if key not in ("from", "value")}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(
            f"{place} has a message that is no object with role and content (or from and value): {message!r:.80}"
        )
    return for_template(message)


def without_filled(value: Any) -> Any:
    """Return a value without the keys of objects that hold None, which tables fill in where other rows have them."""
    if isinstance(value, dict):
        return {key: without_filled(inner) for key, inner in value.items() if inner is not None}
    return [without_filled(inner) for inner in value] if isinstance(value, list) else value


def _by_marks(
    tokenizer: PreTrainedTokenizerBase, chat: list[Message], given: int, place: str, options: Mapping[str, Any]
) -> tuple[list[int], Any]:
    """Take the template's own mask, behind what it writes of the prompt."""
    out: Any = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True, **options)
    ids, loss = out["input_ids"], np.array(out["assistant_masks"], dtype=np.bool_)
    if given:
        prompt: Any = tokenizer.apply_chat_template(chat[:given], add_generation_prompt=True, **options)
        before, _ = divided(prompt["input_ids"], ids)
        loss[: len(before)] = False
    return ids, loss


def _by_prefixes(
    tokenizer: PreTrainedTokenizerBase, chat: list[Message], given: int, place: str, options: Mapping[str, Any]
) -> tuple[list[int], Any]:
    """Find the assistant's turns by rendering the chat up to each of them, with and without it."""

    def render(messages: list[Message], opened: bool = False) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened, **options))

    whole = render(chat)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = np.array(encoded["offset_mapping"])[:, 0]
    loss = np.zeros(len(starts), dtype=np.bool_)
    for turn, message in enumerate(chat):
        if turn < given or message["role"] != "assistant":
            continue
        begin, end = _span(render, whole, chat, turn)
        if begin >= end:
            raise DataError(
                f"{place}: the chat template does not write what turn {turn + 1} says when others follow, so that its "
                "tokens cannot be found: use a template with {% generation %} marks, or a row for each answer, with "
                "what comes before it as its prompt"
            )
        loss |= (starts >= begin) & (starts < end)
    return encoded["input_ids"], loss


def _span(render: Callable[..., str], whole: str, chat: list[Message], turn: int) -> tuple[int, int]:
    """Return where a turn of the assistant begins and ends in the text of a chat; the same place: it is not there."""
    closed, opened = render(chat[: turn + 1]), render(chat[:turn], True) if turn else ""
    # a template may open a turn with more than it writes there in the end, such as empty thoughts
    begin = len(os.path.commonprefix([opened, closed]))
    if whole.startswith(closed):
        return begin, len(closed)
    # later messages change how this turn, or what comes before it, is written: the end is as far from what another
    # turn in its place would change as it is where the turn is the last one
    other = _changed(chat[turn])
    after = _common_end(whole, render([*chat[:turn], other, *chat[turn + 1 :]]))
    closing = _common_end(closed, render([*chat[:turn], other]))
    if after == len(whole):
        return 0, 0
    tail = os.path.commonprefix([whole[len(whole) - after :], closed[len(closed) - closing :]])
    end = len(whole) - after + len(tail)
    if not turn:
        return 0, end
    opening = opened[len(render(chat[:turn])) : begin]
    return whole.rfind(opening, 0, end) + len(opening), end


def _changed(message: Message) -> Message:
    """Return a message that ends with something else than this one."""
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        return {**message, "content": content.rstrip() + ("y" if content.rstrip().endswith("x") else "x")}
    if not message.get("tool_calls"):
        return message
    *calls, last = message["tool_calls"]
    inner = last.get("function", last)
    inner = {**inner, "name": f"{inner['name']}x"}
    return {**message, "tool_calls": [*calls, {**last, "function": inner} if "function" in last else inner]}


def _common_end(one: str, other: str) -> int:
    """Return how many characters two texts end with alike."""
    return len(os.path.commonprefix([one[::-1], other[::-1]]))
