"""The text of an answer, given out as soon as it is certain, and the texts of single tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any

from ag.errors import UserError

CONTEXT = 8  # tokens that decide whether the word behind them begins with a space
LETTER = "A"  # a whole character that is one byte

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # the token of a byte, where a tokenizer falls back to bytes
_ESCAPED = re.compile("[\udc80-\udcff]")  # bytes of no character, as Python escapes them


class Detokenizer:
    """Turns the tokens of an answer into text, one at a time.

    Each character is given out as soon as it is whole, and U+FFFD for what can no longer become one. Half a character
    is not given out, and nothing that could be the beginning of a stop text before it is known not to be one.

    The text in front of the answer decides whether the answer's first word begins with a space, and no more: half a
    character at its end is left out, and what the answer says of it is half a character too.

    Args:
        tokenizer: a fast one of transformers.
        stop: texts that end the answer and are no part of it, none of them empty. One that is a special token ends it
            by its id, since special tokens have no text here.
        before: ids of the text that the answer continues; none where it begins a text of its own.

    Raises:
        UserError: when the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(f"{type(tokenizer).__name__}: expected a fast tokenizer, which decodes token by token.")
        self._backend = tokenizer.backend_tokenizer
        self._letter = _letter(self._backend)
        self._bytes = codecs.getincrementaldecoder("utf-8")("surrogateescape")  # of a tokenizer that falls back to them
        self._ids: list[Any] = []  # that the next token is decoded behind
        self._known = ""  # what of their text was given, or came before the answer
        self._go_on_from(self._whole(before[-CONTEXT:]))
        self._stop, self._ends = tuple(stop), _special(self._backend, stop)
        self._held = ""  # not given out yet
        #: Characters so far, with those that are held back.
        self.length = 0
        #: Characters that were given out.
        self.given = 0
        #: Whether a stop text came.
        self.stopped = False

    def add(self, token: int) -> str:
        """Take the next token; returns the text that is certain now."""
        if token in self._ends:
            self.stopped = True
            return self.rest()
        new = self._next(token)
        self.length += len(new)
        self._held += new
        found = [place for text in self._stop if (place := self._held.find(text)) >= 0]
        if found:
            self.stopped = True
            self._held = self._held[: min(found)]
            return self.rest()
        certain = len(self._held) - max((_begun(self._held, text) for text in self._stop), default=0)
        return self._give(certain)

    def rest(self) -> str:
        """Return the text that was held back; the answer is over."""
        return self._give(len(self._held))

    def _give(self, characters: int) -> str:
        given, self._held = self._held[:characters], self._held[characters:]
        self.given += characters
        return given

    # ---- characters

    def _next(self, token: int) -> str:
        """Return the characters that are whole now, and were not before a token."""
        byte = self._byte(token)
        if byte is not None:
            # decoded here: the tokenizer reads bytes in a row all together, and one that is wrong spoils the others
            self._go_on_from([self._letter])
            return _ESCAPED.sub("\ufffd", self._bytes.decode(byte))
        ids, known = [*self._ids, token], self._known
        text = self._decoded(ids)
        if not text.startswith(known):  # such as of a tokenizer that moves marks of punctuation to the word before
            ids, known, text = [token], "", self._decoded([token])
        new = self._certain(text)[len(known) :]
        if new:
            self._go_on_from(ids[-CONTEXT:])
            return _ESCAPED.sub("\ufffd", self._bytes.decode(b"", final=True)) + new
        if self._certain(text) != text or not known:
            self._ids = ids  # half a character more, or a space that is dropped where the text begins
        return ""

    def _go_on_from(self, ids: list[Any]) -> None:
        """Have the next token decoded behind others, whose text was given."""
        self._ids, self._known = ids, self._certain(self._decoded(ids))

    def _whole(self, ids: Sequence[int]) -> list[Any]:
        """Return tokens without half a character at their end; a byte alone counts as a character."""
        whole = [token if self._byte(token) is None else self._letter for token in ids]
        while (text := self._decoded(whole)) != self._certain(text):
            whole.pop()
        return whole

    def _decoded(self, ids: list[Any]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=True))

    def _certain(self, text: str) -> str:
        """Return a text without what may be half a character at its end."""
        return text[:-1] if self._letter is None and text.endswith("\ufffd") else text

    def _byte(self, token: int) -> bytes | None:
        """Return the byte that a token is; None: it is no byte."""
        found = None if self._letter is None else _BYTE.fullmatch(self._backend.id_to_token(token) or "")
        return None if found is None else bytes.fromhex(found[1])


class Spelling:
    """Spells single tokens, as they stand in the middle of a text: with the space that begins a word.

    Args:
        tokenizer: a fast one of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._before: list[int] = self._backend.encode("a", add_special_tokens=False).ids
        self._known = self._decoded(self._before)

    def __call__(self, token: int) -> str:
        """Return the text of a token; U+FFFD stands for half a character."""
        behind = self._decoded([*self._before, token])
        return behind[len(self._known) :] if behind.startswith(self._known) else self._decoded([token])

    def _decoded(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))


def _letter(backend: Any) -> int | None:
    """Return the token of a byte that is a letter; None: the tokenizer does not fall back to bytes."""
    token: int | None = backend.token_to_id(f"<0x{ord(LETTER):02X}>")
    return token if token is not None and backend.decode([token]) == LETTER else None


def _special(backend: Any, texts: Sequence[str]) -> set[int]:
    """Return the special tokens among texts, by their ids."""
    added = backend.get_added_tokens_decoder() if texts else {}
    found = (backend.token_to_id(text) for text in texts)
    return {token for token in found if token in added and added[token].special}


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are the beginning of a stop text, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
