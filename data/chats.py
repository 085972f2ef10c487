"""Chats as rows of tokens: rendered by the tokenizer's template, with the loss on turns of the assistant.

Where the template marks what the assistant says (``{% generation %}``), the marks say which tokens carry loss. Else a
turn of the assistant is what the template writes between opening the turn, as for an answer, and the next message.

Where a message lies is known, not searched for: the chat is rendered once more with a symbol for each letter of what a
message says, a symbol of its own for each text. The two renderings have to agree in all else. So what a message says
cannot be taken for what the template writes or for what another one says, and what carries loss is checked by it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2 import Environment

from ag.data.collate import Row
from ag.data.sources import DataError
from ag.model.chat import REFUSALS, Message, for_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKED = re.compile(r"{%-?\s*generation\s*-?%}")
#: What ShareGPT's ``from`` says, and what templates call it; other names stay.
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # that a template may leave out
SYMBOL = 0x100000  # the first symbol: characters that Unicode leaves to private use
BLANK = r"[\s\"\\\x00-\x1f]"  # a blank, or what JSON escapes


class Said(NamedTuple):
    """A text of a message, in which a symbol stands for each letter."""

    turn: int
    letters: str
    needed: bool  # the template has to write it


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
            One with ``weight`` 0 carries no loss (OpenAI).
        place: file and row, for messages.
        given: so many messages are the prompt, in which no turn carries loss.
        end: tokens behind the chat, which carry loss.
        options: more arguments of the template, such as ``tools``.

    Raises:
        DataError: no chat template, no turn to learn from, a chat that does not go through the template, or a turn that
            the template does not write as it is.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"{place} has messages, and the tokenizer {tokenizer.name_or_path} has no chat template: use a model with "
            "one, such as its instruct version, or rows with a prompt and a response"
        )
    chat = [_message(message, place) for message in messages]
    weights = [message.pop("weight", 1) for message in chat]
    if wrong := [weight for weight in weights if weight not in (0, 1)]:
        raise DataError(f"{place} has a message with weight={wrong[0]!r:.80}: expected 0 (no loss on it) or 1")
    taught = [i for i in range(given, len(chat)) if chat[i]["role"] == "assistant" and weights[i]]
    if not taught:
        raise DataError(f"{place} has no message with role=assistant that carries loss; leave the row out")
    if not all(_is_text(chat[turn].get("content")) or chat[turn].get("tool_calls") for turn in taught):
        raise DataError(f"{place} has an empty turn of the assistant: leave the row out, or write a response")
    try:
        ids, loss = _Rendered(tokenizer, chat, taught, place, options).tokens()
    except DataError:
        raise
    except REFUSALS as error:
        raise DataError(f"{place} does not go through the tokenizer's chat template: {error}") from error
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


def _is_text(content: Any) -> bool:
    return bool(content.strip() if isinstance(content, str) else content)


class _Rendered:
    """A chat as its template writes it, and the same text with symbols for the letters that messages say."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: list[Message],
        taught: list[int],
        place: str,
        options: Mapping[str, Any],
    ) -> None:
        self.tokenizer, self.chat, self.taught, self.place, self.options = tokenizer, chat, taught, place, options
        self.said: list[Said] = []
        self.stays = _stays(str(tokenizer.get_chat_template(tools=options.get("tools"))))
        self.hidden = [self._hide(turn, message) for turn, message in enumerate(chat)]
        self.text, self.cover = self._render(chat), self._render(self.hidden)
        self.places: list[list[int]] = [[] for _ in self.said]  # of each symbol
        for at, one in enumerate(self.cover):
            if self._is_symbol(one):
                self.places[ord(one) - SYMBOL].append(at)

    def tokens(self) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """Return the tokens, and which of them carry loss.

        Raises:
            DataError: it cannot be told of a turn which tokens are its own.
        """
        self._check_text()
        encoded = self.tokenizer(self.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = np.array(encoded["offset_mapping"]).reshape(-1, 2)
        loss = self._by_marks(offsets) if is_marked(self.tokenizer) else self._by_turns(offsets)
        self._check_loss(loss, offsets)
        return encoded["input_ids"], loss

    def _render(self, messages: list[Message], opened: bool = False) -> str:
        told = {"tokenize": False, "add_generation_prompt": opened, **self.options}
        return str(self.tokenizer.apply_chat_template(messages, **told))

    def _hide(self, turn: int, message: Message) -> Message:
        """Return a message with symbols for the letters that it says."""

        def hide(value: Any, needed: bool = True) -> Any:
            if isinstance(value, dict):
                return {key: hide(inner, needed) for key, inner in value.items()}
            if isinstance(value, list):
                return [hide(inner, needed) for inner in value]
            if not isinstance(value, str):
                return value
            symbol, pieces = chr(SYMBOL + len(self.said)), self.stays.split(value)
            self.said.append(Said(turn, "".join(pieces[::2]), needed))
            pieces[::2] = [symbol * len(letters) for letters in pieces[::2]]
            return "".join(pieces)

        def hide_call(call: Any) -> Any:
            inner, before = call.get("function", call), len(self.said)
            inner = inner | {"arguments": hide(inner.get("arguments"))}
            if not any(said.letters for said in self.said[before:]):  # only the name shows where the call lies
                inner |= {"name": hide(inner.get("name"))}
            return {**call, "function": inner} if "function" in call else inner

        out = message | {key: hide(message[key], needed=False) for key in THOUGHTS if key in message}
        if isinstance(content := message.get("content"), list):
            out["content"] = [
                part | {"text": hide(part["text"])} if isinstance(part, dict) and "text" in part else part
                for part in content
            ]
        elif content is not None:
            out["content"] = hide(content)
        if calls := message.get("tool_calls"):
            out["tool_calls"] = [hide_call(call) for call in calls]
        return out

    def _is_symbol(self, letter: str) -> bool:
        return SYMBOL <= ord(letter) < SYMBOL + len(self.said)

    def _turns(self, cover: str) -> list[int]:
        """Return the turns that a text with symbols is of, letter by letter."""
        return [self.said[ord(one) - SYMBOL].turn for one in cover if self._is_symbol(one)]

    def _check_text(self) -> None:
        """Require that the template writes the turns that carry loss, and leaves out thoughts before them at most."""
        pairs = enumerate(zip(self.text, self.cover, strict=False))
        changed = next((at for at, (one, other) in pairs if one != other and not self._is_symbol(other)), None)
        if changed is not None or len(self.text) != len(self.cover):
            turn = (self._turns(self.cover[:changed]) or [0])[-1]
            raise self._refused(turn, "writes other words around turn {} when that turn says other words")
        for turn in self.taught:
            if not any(said.letters for said in self.said if said.turn == turn and said.needed):
                raise self._refused(turn, "has all that turn {} says among its own strings")
        for said, places in zip(self.said, self.places, strict=True):
            written = "".join(self.text[at] for at in places[: len(said.letters)])
            whole = said.letters.endswith(written) if written else not said.letters
            if said.turn in self.taught and said.needed and not whole:
                raise self._refused(said.turn, "does not write what turn {} says as it is")

    def _by_marks(self, offsets: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Take the template's own mask, without the turns that are not to carry loss."""
        told = {"return_dict": True, "return_assistant_tokens_mask": True, **self.options}
        out: Any = self.tokenizer.apply_chat_template(self.chat, **told)
        loss = np.array(out["assistant_masks"], dtype=np.bool_)
        for first, behind in np.flatnonzero(np.diff([0, *loss.astype(int), 0])).reshape(-1, 2):
            begin, end = offsets[first][0], offsets[behind - 1][1]
            of = self._turns(self.cover[begin:end]) or self._turns(self.cover[:begin])[-1:]
            loss[first:behind] = bool(set(of) & set(self.taught))
        return loss

    def _by_turns(self, offsets: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Take of each turn what it says, and what closes it as far as that is a token of its own."""
        starts, ends = offsets.T
        loss = np.zeros(len(offsets), dtype=np.bool_)
        for turn in self.taught:
            begin, said, end = self._begin(turn), *self._end(turn)
            loss |= (ends > begin) & ((starts < said) | (ends <= end))
        return loss

    def _begin(self, turn: int) -> int:
        """Return where the template begins what it writes of a turn, behind how it opens an answer."""
        if not turn:
            return min(
                at for said, places in zip(self.said, self.places, strict=True) if not said.turn for at in places
            )
        before, opening = self._behind(self._render(self.hidden[:turn], opened=True), turn)
        # a template may open an answer with more than it writes there in the end, such as a tag of thoughts
        common = _common(opening, self.cover[before:])
        _, unopened = self._behind(self._render(self.hidden[:turn]), turn)
        if common < len(opening) and common <= _common(opening, unopened):
            raise self._refused(turn, "begins turn {} otherwise than it opens an answer")
        return before + common

    def _end(self, turn: int) -> tuple[int, int]:
        """Return where what a turn says ends, and where the template has closed it."""
        said, closing = self._behind(self._render(self.hidden[: turn + 1]), turn)
        return said, said + _common(closing, self.cover[said:])

    def _behind(self, part: str, turn: int) -> tuple[int, str]:
        """Find in the text the last letter that the first messages say, from the rendering of these alone.

        Returns:
            Where it ends in the text, and what the template writes behind it in the rendering.
        """
        at = next((at for at in reversed(range(len(part))) if self._is_symbol(part[at])), None)
        if at is None:
            return 0, part
        places = self.places[ord(part[at]) - SYMBOL]
        if not places:
            raise self._refused(turn, "changes what comes before turn {} when others follow")
        return places[min(part.count(part[at]), len(places)) - 1] + 1, part[at + 1 :]

    def _check_loss(self, loss: npt.NDArray[np.bool_], offsets: npt.NDArray[Any]) -> None:
        """Require loss on all that is said in the turns that are to carry it, and on nothing that others say."""

        def covered(tokens: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
            steps = np.zeros(len(self.text) + 1, dtype=np.int64)
            np.add.at(steps, offsets[tokens, 0], 1)
            np.add.at(steps, offsets[tokens, 1], -1)
            return np.cumsum(steps) > 0

        carries, bare = covered(loss), covered(~loss)
        for said, places in zip(self.said, self.places, strict=True):
            own = places[: len(said.letters)]
            if said.turn not in self.taught and carries[own].any():
                raise self._refused(said.turn, "would put loss on what turn {} says")
            if said.turn in self.taught and said.needed and bare[own].any():
                raise self._refused(said.turn, "leaves some of what turn {} says without loss")

    def _refused(self, turn: int, what: str) -> DataError:
        return DataError(
            f"{self.place}: the chat template {what.format(turn + 1)}, so that it is not known which tokens carry "
            "loss: use a template with {% generation %} marks, a row for each answer with what comes before it as its "
            "prompt, or leave the row out"
        )


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    return len(os.path.commonprefix([one, other]))


@lru_cache(maxsize=8)
def _stays(template: str) -> re.Pattern[str]:
    """Return what no symbol stands for, as the group of a pattern.

    Blanks stay, which templates strip, and so does what JSON escapes and each string of the template, such as
    ``</think>``, which it may look for.
    """
    strings = {
        token.value.strip()
        for token in Environment(autoescape=True).lexer.tokenize(template)
        if token.type == "string" and re.search(r"[^\w\s]", token.value)
    }
    pieces = [re.escape(one) for one in sorted(strings, key=len, reverse=True) if one]
    return re.compile(f"({'|'.join([*pieces, BLANK])})")
