"""The text of an answer as a stream of final pieces, and the texts of single tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ag.errors import UserError

LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}  # the alphabet of byte-level tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # token of a byte in a tokenizer with byte fallback


class Vocabulary:
    """The texts of a tokenizer's tokens in the middle of a text, thus with the space before a word.

    Args:
        tokenizer: a fast one of transformers.

    Raises:
        UserError: when the tokenizer is not a fast one.
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
        """Return the text of a token, also of a special one; U+FFFD stands for a part of a character."""
        return self._decoded(token, skip_special_tokens=False)

    def bytes_of(self, token: int, first: bool = False) -> bytes:
        """Return the UTF-8 bytes of a token, possibly a part of a character; special tokens have no bytes.

        Args:
            token: its id.
            first: True at the beginning of a text, where many tokenizers drop a space.
        """
        piece = self._backend.id_to_token(token) or ""
        if self._falls_back and (byte := _BYTE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        text = str(self._backend.decode([token])) if first else self._decoded(token, skip_special_tokens=True)
        if "\ufffd" in text and LETTERS.keys() >= set(piece):
            return bytes(LETTERS[letter] for letter in piece)
        return text.encode()

    def _decoded(self, token: int, **options: bool) -> str:
        known, text = (str(self._backend.decode(ids, **options)) for ids in (self._before, [*self._before, token]))
        return text[len(known) :] if text.startswith(known) else str(self._backend.decode([token], **options))


class Detokenizer:
    """Turns the tokens of an answer into text, one token at a time.

    A character is returned once it is complete, and U+FFFD for bytes that cannot become one. Text that may be the
    beginning of a stop text is held back until it is certain that it is not.

    Args:
        vocabulary: of the tokenizer.
        stop: texts, not empty, that end the answer. A special token is found by its id.
        include_stop: True if the text that ends the answer is part of it.
        least: tokens of the answer before which no text ends it.
        continues: True if the answer continues a text, so that its first word may begin with a space.
        special: True if special tokens have a text, as in a prompt.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        least: int = 0,
        continues: bool = False,
        special: bool = False,
    ) -> None:
        self._vocabulary, self._stop, self._begins = vocabulary, tuple(stop), not continues
        self._special = {token: text.encode() for text, token in vocabulary.special.items()} if special else {}
        self._ends = {vocabulary.special[text]: text for text in stop if text in vocabulary.special}
        self._include_stop, self._least = include_stop, least
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # text that is held back
        #: Characters so far, including those held back.
        self.length = 0
        #: Characters returned so far.
        self.given = 0
        #: True once a stop text has occurred.
        self.stopped = False

    def add(self, token: int) -> str:
        """Add the next token; returns the text that became final."""
        self._least -= 1
        if token in self._ends and self._least < 0:
            self._read(b"", last=True)
            self._held += self._ends[token] if self._include_stop and not self.stopped else ""
            self.stopped = True
            return self.rest()
        found = self._vocabulary.bytes_of(token)
        if found and self._begins:
            found, self._begins = self._vocabulary.bytes_of(token, first=True), False
        self._read(self._special.get(token, found))
        if self.stopped:
            return self.rest()
        return self._give(len(self._held) - max((_begun(self._held, text) for text in self._stop), default=0))

    def rest(self) -> str:
        """Return the text that was held back, with U+FFFD for half a character; call this after the last token."""
        if not self.stopped:
            self._read(b"", last=True)
        return self._give(len(self._held))

    def _read(self, new: bytes, last: bool = False) -> None:
        """Hold back the characters that new bytes complete, up to a stop text; ``last`` ends the text."""
        text = self._bytes.decode(new, last)
        self.length += len(text)
        self._held += text
        stop = self._stop if self._least < 0 else ()
        places = [(place, text) for text in stop if (place := self._held.find(text)) >= 0]
        if places:
            place, text = min(places)
            self.stopped = True
            self._held = self._held[: place + len(text) * self._include_stop]

    def _give(self, characters: int) -> str:
        given, self._held = self._held[:characters], self._held[characters:]
        self.given += characters
        return given


def _begun(text: str, stop: str) -> int:
    """Return the length of the longest suffix of a text that is a proper prefix of a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
