"""Chats as rows of tokens: rendered by the tokenizer's template, with the loss on turns of the assistant.

Where the template marks what the assistant says (``{% generation %}``), the marks say which tokens carry loss. Else a
turn of the assistant is what the template writes between opening the turn and closing it, which is found by rendering
the chat up to each turn, with and without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from ag.data.collate import Row
from ag.data.encode import divided
from ag.data.sources import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKED = re.compile(r"{%-?\s*generation\s*-?%}")
#: What ShareGPT's ``from`` says, and what templates call it; other names stay.
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}

Message = dict[str, Any]


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
        messages: objects with ``role`` and ``content``, or ``from`` and ``value`` (ShareGPT).
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
    except (TemplateError, TypeError, ValueError, NotImplementedError) as error:  # a template may do anything
        raise DataError(f"{place} does not go through the tokenizer's chat template: {error}") from error
    if not loss.any():
        raise DataError(
            f"{place}: the chat template marks no token of the assistant's turns; check its generation marks"
        )
    tokens = np.array([*ids, *end], dtype=np.int32)
    return Row(tokens, int(loss.argmax()), loss=np.append(loss, np.ones(len(end), dtype=np.bool_)))


def _message(message: Any, place: str) -> Message:
    """Return a message with the keys and roles of chat templates, without what a table filled in (None)."""
    if isinstance(message, dict) and "role" not in message and isinstance(message.get("from"), str):
        named = {"role": ROLES.get(message["from"], message["from"]), "content": message.get("value")}
        message = named | {key: value for key, value in message.items() if key not in ("from", "value")}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(
            f"{place} has a message that is no object with role and content (or from and value): {message!r:.80}"
        )
    return {key: value for key, value in message.items() if value is not None or key == "content"}


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

    def render(count: int, opened: bool = False) -> str:
        return str(tokenizer.apply_chat_template(chat[:count], tokenize=False, add_generation_prompt=opened, **options))

    whole = render(len(chat))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = np.array(encoded["offset_mapping"])[:, 0]
    loss = np.zeros(len(starts), dtype=np.bool_)
    for turn, message in enumerate(chat):
        if turn < given or message["role"] != "assistant":
            continue
        closed, opened = render(turn + 1), render(turn, True) if turn else ""
        if not whole.startswith(closed):
            raise DataError(
                f"{place}: the chat template writes turn {turn + 1} in another way when others follow, so that its "
                "tokens cannot be found: use a template with {% generation %} marks"
            )
        # a template may open a turn with more than it writes there in the end, such as empty thoughts
        loss |= (starts >= len(os.path.commonprefix([opened, closed]))) & (starts < len(closed))
    return encoded["input_ids"], loss
