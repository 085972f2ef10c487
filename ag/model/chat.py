"""Where the parts of a chat lie among the tokens of its text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

from ag.errors import UserError

Part = Literal["template", "system"]


def spans(
    tokenizer: Any, text: str, messages: Sequence[Mapping[str, str]], parts: Collection[str]
) -> list[tuple[int, int]]:
    """Return the tokens of parts of a chat, as :meth:`ag.EvictionCache.protect` takes them.

    Args:
        tokenizer: a fast tokenizer, which knows where in a text its tokens are.
        text: what its chat template makes of the messages, as it is tokenized (without special tokens beside it).
        messages: with ``role`` and ``content`` each.
        parts: ``template``: what the template adds to the messages; ``system``: what system messages say.

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
        content = message["content"].strip()
        begin = text.find(content, at)
        if begin < 0:
            raise UserError(
                f"protect={next(iter(parts))}: the chat template changes a {message['role']} message, so that it is "
                "not known where it lies; protect spans of tokens such as 0-40."
            )
        at = begin + len(content)
        of_part[begin:at] = [message["role"]] * len(content)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    chosen = [any(of_part[place] in parts for place in range(*offset)) for offset in offsets]
    found: list[tuple[int, int]] = []
    for place, inside in enumerate(chosen):
        if inside and found and found[-1][1] == place:
            found[-1] = found[-1][0], place + 1
        elif inside:
            found.append((place, place + 1))
    return found
