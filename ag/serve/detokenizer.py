"""The text of an answer, given out as soon as it is certain, and the texts of single tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ag.errors import UserError

LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}  # that tokenizers of bytes write for them

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # the token of a byte, where a tokenizer falls back to bytes


class Vocabulary:
    """What the tokens of a tokenizer say, each as it stands in the middle of a text: with the space before a word.

    Args:
        tokenizer: a fast one of transformers.

    Raises:
        UserError: when it is not a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(f"{type(tokenizer).__name__}: expected a fast tokenizer, which decodes token by token.")
        self._backend = tokenizer.backend_tokenizer
        self._before: list[int] = self._backend.encode("a", add_special_tokens=False).ids
        letter = self._backend.token_to_id("<0x41>")
        self._falls_back = letter is not None and self._backend.decode([letter]) == "A"
        added = self._backend.get_added_tokens_decoder()
        #: Special tokens by their texts.
        self.special: dict[str, int] = {token.content: number for number, token in added.items() if token.special}

    def text(self, token: int) -> str:
        """Return the text of a token, be it a special one; U+FFFD stands for half a character."""
        return self._decoded(token, skip_special_tokens=False)

    def said(self, token: int, first: bool = False) -> bytes:
        """Return the bytes of a token in UTF-8, maybe half of a character; special tokens have none.

        Args:
            token: its id.
            first: whether it begins a text, where many tokenizers drop a space.
        """
        piece = self._backend.id_to_token(token) or ""
        if self._falls_back and (byte := _BYTE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        text = str(self._backend.decode([token])) if first else self._decoded(token, skip_special_tokens=True)
        if "\ufffd" in text and LETTERS.keys() >= set(piece):
            return bytes(LETTERS[letter] for letter in piece)
        return text.encode()

    def _decoded(self, token: int, **told: bool) -> str:
        known, text = (str(self._backend.decode(ids, **told)) for ids in (self._before, [*self._before, token]))
        return text[len(known) :] if text.startswith(known) else str(self._backend.decode([token], **told))


class Detokenizer:
    """Turns the tokens of an answer into text, one at a time.

    Each character is given out as soon as it is whole, and U+FFFD for what can no longer become one. Half a character
    is not given out, and nothing that could be the beginning of a stop text before it is known not to be one.

    Args:
        vocabulary: of the tokenizer.
        stop: texts that end the answer and are no part of it, none of them empty. One that is a special token ends it
            by its id, since special tokens have no text here.
        continues: whether the answer goes on with a text, so that its first word may begin with a space.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str] = (), continues: bool = False) -> None:
        self._vocabulary, self._stop, self._begins = vocabulary, tuple(stop), not continues
        self._ends = {vocabulary.special[text] for text in stop if text in vocabulary.special}
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
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
        said = self._vocabulary.said(token)
        if said and self._begins:
            said, self._begins = self._vocabulary.said(token, first=True), False
        new = self._bytes.decode(said)
        self.length += len(new)
        self._held += new
        found = [place for text in self._stop if (place := self._held.find(text)) >= 0]
        if found:
            self.stopped = True
            self._held = self._held[: min(found)]
            return self.rest()
        return self._give(len(self._held) - max((_begun(self._held, text) for text in self._stop), default=0))

    def rest(self) -> str:
        """Return the text that was held back; the answer is over."""
        return self._give(len(self._held))

    def _give(self, characters: int) -> str:
        given, self._held = self._held[:characters], self._held[characters:]
        self.given += characters
        return given


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are the beginning of a stop text, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
